"""Elements that caches hold in memory."""

from contextlib import contextmanager

from torch import Tensor

from ragen2_trl.instrument.scoring import cache_of


@contextmanager
def count_cache_elements(model):
    """Yields a list of how many elements caches hold in memory, once for each forward pass within.

    Counted are the cache that a pass was given, as it is after the pass, and the latest that was made without one: the
    prompt's. Memory that both refer to counts once, and that of a view is what it keeps alive.
    """
    counts = []
    of_prompt = []

    def count(module, args, kwargs, output):
        given, made = kwargs.get("cache", kwargs.get("past_key_values")), cache_of(output)
        if given is None and made is not None:
            of_prompt[:] = _tensors(made)
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in [*of_prompt, *_tensors(given or made)]}
        counts.append(sum(t.untyped_storage().nbytes() // t.element_size() for t in storages.values()))

    handle = model.register_forward_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()


def _tensors(cache):
    values = [value for layer in (cache.layers if cache else []) for value in vars(layer).values()]
    values += [value for states in values if isinstance(states, dict) for value in states.values()]
    return [value for value in values if isinstance(value, Tensor)]
