"""Whether a callback belongs to the trainer that it was added to, and is the newest of its class there."""

from transformers import Trainer, TrainerCallback, TrainerState


def check_own_trainer(callback: TrainerCallback, trainer: Trainer, state: TrainerState) -> None:
    """Raise a `ValueError` if a callback that was made for one trainer has been added to another."""
    if state is not trainer.state:
        raise ValueError(
            f"{type(callback).__name__} was made for another {type(trainer).__name__}; make one for this trainer: "
            f"trainer.add_callback({type(callback).__name__}(trainer))."
        )


def is_newest(callback: TrainerCallback, trainer: Trainer) -> bool:
    """Whether no later callback of its class takes its place: a cell of a notebook that is run again adds another."""
    of_class = [other for other in trainer.callback_handler.callbacks if type(other) is type(callback)]
    return bool(of_class) and of_class[-1] is callback
