"""How much reasoning depends on its input: the proxies of arXiv 2604.06268 (Table 1) from a cross-scoring matrix.

The matrix holds, for every reasoning trace Z, its log-probability under every prompt X of a batch. If Z is likelier
under its own prompt than under the others, it carries information about the prompt; if all prompts explain it equally
well, it is a template.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

RETRIEVAL_DEPTHS = (2, 4, 8)
# Sequence mixture in nats; the same in nats per token (the paper's Eq. 1); mixture of per-token means (RAGEN's code).
FORMS = ("seq", "token", "token_tempered")
ZSCORE_EPS = 1e-3


def information_metrics(
    cross_logps: Tensor,
    lengths: Tensor,
    prompt_index: Tensor,
    *,
    prompt_class: Tensor | None = None,
    prefix: str = "",
) -> dict[str, float]:
    """All proxies of the mutual information between prompts and reasoning (arXiv 2604.06268, Eq. 1 and Table 1).

    With L the matrix and i the own prompt of a reasoning trace of `length` tokens, in nats:

    - `mi_seq`: mean of L_i - log(1/N Σ_j exp L_j), at most log N;
    - `mi_token`: the same divided by each length (the paper's form, which shrinks as 1/length once it saturates);
    - `mi_token_tempered`: mean of L_i/length - log(1/N Σ_j exp(L_j/length)). RAGEN's code logs this one. It is not
      bounded by the mutual information, but does not shrink with length;
    - `mi_zscore_*`: each of them over `marginal_std_*` + 0.001, the standard deviation of the second term (ddof 0);
    - `conditional_entropy_*` H(Z|X) and `marginal_entropy_*` H(Z): minus the means of the first and of the second
      term, for sequences and per token;
    - `retrieval_accuracy` and `retrieval_accuracy@k`, k = 2, 4, 8: how often the own prompt explains the reasoning
      trace best, or is among the k that do. Columns of an identical prompt count as the own one. Ties count as if
      broken at random, so that a model that ignores its prompt lands on chance;
    - `retrieval_chance` and `retrieval_chance@k`: what a random choice gives, exact also with identical prompts
      (hypergeometric).

    Args:
        cross_logps: (B, N) log p(Z_b | x_n) in nats, summed over reasoning tokens.
        lengths: (B,) number of tokens of each reasoning trace.
        prompt_index: (B,) column of the prompt that each reasoning trace was sampled from.
        prompt_class: (N,) equal ids for identical prompts. Default: all differ.
        prefix: put before each key.

    Returns:
        The metrics above, `mi_upper_bound` (the most that `mi_seq` can be: log of the number of distinct prompts,
        where each has as many columns), `num_prompts` (distinct ones) and `num_completions`.

    Raises:
        ValueError: With fewer than two distinct prompts, no reasoning trace, shapes that do not fit, an index outside
            its range, a length below 1 or a log-probability that is not finite.

    >>> separable = torch.tensor([[-1.0, -50.0], [-50.0, -1.0]])
    >>> metrics = information_metrics(separable, torch.tensor([5, 5]), torch.tensor([0, 1]))
    >>> round(metrics["mi_seq"], 4), metrics["retrieval_accuracy"], metrics["retrieval_chance"]
    (0.6931, 1.0, 0.5)
    """
    if prompt_class is None:
        prompt_class = torch.arange(cross_logps.shape[-1] if cross_logps.ndim else 0)
    _check_inputs(cross_logps, lengths, prompt_index, prompt_class)
    logps = cross_logps.double().cpu()  # (B, N)
    lengths, prompt_index, prompt_class = lengths.double().cpu(), prompt_index.long().cpu(), prompt_class.cpu()
    num_prompts = logps.shape[1]
    per_token = logps / lengths[:, None]

    matched = logps.gather(1, prompt_index[:, None]).squeeze(1)  # (B,)
    mixture = logps.logsumexp(dim=1) - math.log(num_prompts)
    terms = {
        "seq": (matched, mixture),
        "token": (matched / lengths, mixture / lengths),
        "token_tempered": (matched / lengths, per_token.logsumexp(dim=1) - math.log(num_prompts)),
    }
    metrics: dict[str, float] = {}
    for form, (own, marginal) in terms.items():
        mi, std = (own - marginal).mean().item(), marginal.std(correction=0).item()
        metrics |= {f"mi_{form}": mi, f"mi_zscore_{form}": mi / (std + ZSCORE_EPS), f"marginal_std_{form}": std}
    for form in ("seq", "token"):
        own, marginal = terms[form]
        metrics[f"conditional_entropy_{form}"] = -own.mean().item()
        metrics[f"marginal_entropy_{form}"] = -marginal.mean().item()

    own_class = prompt_class[prompt_index][:, None] == prompt_class  # (B, N)
    for depth in (1, *RETRIEVAL_DEPTHS):
        suffix = "" if depth == 1 else f"@{depth}"
        metrics[f"retrieval_accuracy{suffix}"] = _hit_rate(logps, own_class, depth)
        # Chance is what is left where every prompt explains a reasoning trace equally well.
        metrics[f"retrieval_chance{suffix}"] = _hit_rate(torch.zeros_like(logps), own_class, depth)
    num_classes = len(set(prompt_class.tolist()))
    # No reasoning trace can say more than which class its prompt is in, of d identical columns among N.
    metrics |= {
        "mi_upper_bound": math.log(num_prompts) - own_class.sum(dim=1).double().log().mean().item(),
        "num_prompts": float(num_classes),
        "num_completions": float(len(logps)),
    }
    return {f"{prefix}{key}": value for key, value in metrics.items()}


def _check_inputs(cross_logps: Tensor, lengths: Tensor, prompt_index: Tensor, prompt_class: Tensor) -> None:
    if cross_logps.ndim != 2 or len(cross_logps) == 0:
        raise ValueError(f"cross_logps must have shape (B, N) with B at least 1, got {tuple(cross_logps.shape)}")
    rows, columns = cross_logps.shape
    for name, values, shape in (
        ("lengths", lengths, (rows,)),
        ("prompt_index", prompt_index, (rows,)),
        ("prompt_class", prompt_class, (columns,)),
    ):
        if tuple(values.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(values.shape)}")
    if not cross_logps.isfinite().all():
        row, column = (~cross_logps.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"cross_logps must be finite, got {cross_logps[row, column].item()} at [{row}, {column}]")
    if lengths.min() < 1:
        raise ValueError(f"lengths must be at least 1, got {lengths.min().item()}")
    if prompt_index.min() < 0 or prompt_index.max() >= columns:
        raise ValueError(
            f"prompt_index must be between 0 and {columns - 1}, "
            f"got {prompt_index.min().item()} to {prompt_index.max().item()}"
        )
    if len(set(prompt_class.tolist())) < 2:
        raise ValueError(f"prompt_class must hold at least two distinct prompts, got one in {columns} columns")


def _hit_rate(logps: Tensor, own_class: Tensor, depth: int) -> float:
    """How often a column of the own class is among the `depth` largest, ties broken at random.

    Columns tied with the best of the own class share the places that strictly larger ones leave, so that the number of
    own ones among them is hypergeometric.
    """
    best = logps.masked_fill(~own_class, -torch.inf).amax(dim=1, keepdim=True)  # (B, 1)
    ahead = (logps > best).sum(dim=1)
    tied = logps == best
    tied_own, tied_other = (tied & own_class).sum(dim=1), (tied & ~own_class).sum(dim=1)
    hits = 0.0
    for before, own, other in zip(ahead.tolist(), tied_own.tolist(), tied_other.tolist(), strict=True):
        places = min(max(depth - before, 0), own + other)
        hits += 1.0 - math.comb(other, places) / math.comb(own + other, places)
    return hits / len(logps)


@dataclass
class MarginalStdEMA:
    """Running scale of the z-scores (arXiv 2604.06268, Table 1: MI-ZScore-EMA). One for each scope.

    Args:
        decay: Weight of the past: decay·old + (1 - decay)·new. The first value is taken as it is.
        values: Standard deviation for each of `FORMS`; what a checkpoint has to keep.
    """

    decay: float = 0.9
    values: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"decay must be at least 0 and below 1, got {self.decay!r}")

    def update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Takes in a measurement of `information_metrics` and returns its `mi_zscore_ema_*`, its own std included."""
        scores = {}
        for form in FORMS:
            std = metrics[f"marginal_std_{form}"]
            self.values[form] = self.decay * self.values.get(form, std) + (1 - self.decay) * std
            scores[f"mi_zscore_ema_{form}"] = metrics[f"mi_{form}"] / (self.values[form] + ZSCORE_EPS)
        return scores
