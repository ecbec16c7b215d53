"""Images and alerts in the experiment trackers of a trainer, beside the scalars that they belong to."""

from collections.abc import Mapping
from io import BytesIO
from typing import TypeAlias

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from transformers import Trainer
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback, rewrite_logs

Tracker: TypeAlias = TensorBoardCallback | TrackioCallback | WandbCallback
Images: TypeAlias = Mapping[str, Image.Image]

STEP_KEY = "train/global_step"  # the axis that transformers writes into every row of trackio and wandb
DPI = 110  # a figure of 6 by 5 inches is 660 pixels wide and takes some 45 kB


def has_image_trackers(trainer: Trainer) -> bool:
    """Whether [`log_figures`] would reach a tracker now. If not, figures need not be drawn."""
    return bool(_active_trackers(trainer))


def log_figures(trainer: Trainer, figures: Mapping[str, Figure]) -> None:
    """Log figures as images into the active trackers, at the x position of the row that was just logged.

    Meant for `on_log` of a callback: then the trackers of transformers have written the row, so that its step is
    known however rows are spaced. TensorBoard has the image at that optimizer step, wandb and trackio in a row of its
    own with the same `train/global_step`; trackio's own axis stays what it is.

    Names are rewritten as those of scalars are: `mi/matrix` becomes `train/mi/matrix`. Trackers other than
    TensorBoard, trackio and wandb get no images. There are no active trackers outside of training and on processes
    other than the main one; nothing is drawn then.

    Args:
        trainer: whose trackers are written to.
        figures: matplotlib figures by name.
    """
    trackers = _active_trackers(trainer)
    if not trackers:
        return
    images = rewrite_logs({name: _draw(figure) for name, figure in figures.items()})
    for tracker in trackers:
        if isinstance(tracker, TensorBoardCallback):
            _log_to_tensorboard(tracker, images, trainer.state.global_step)
        elif isinstance(tracker, TrackioCallback):
            _log_to_trackio(tracker, images, trainer.state.global_step)
        else:
            _log_to_wandb(tracker, images, trainer.state.global_step)


def send_alert(trainer: Trainer, title: str, text: str, *, is_error: bool) -> None:
    """Alert whoever watches the active trackers: trackio shows it on its page, wandb sends it. Others have no alerts.

    Args:
        trainer: whose trackers they are.
        title: of less than 64 characters.
        text: with the numbers.
        is_error: whether training fails; otherwise it is a warning.
    """
    level = "ERROR" if is_error else "WARN"
    for tracker in _active_trackers(trainer):
        if isinstance(tracker, TrackioCallback):
            tracker._trackio.alert(title, text, tracker._trackio.AlertLevel[level])
        elif isinstance(tracker, WandbCallback):
            tracker._wandb.run.alert(title, text, level)


def _active_trackers(trainer: Trainer) -> list[Tracker]:
    # After training, trackio raises and a TensorBoard writer is gone; wandb's run would still take images.
    if not trainer.is_in_train or not trainer.state.is_world_process_zero:
        return []
    return [callback for callback in trainer.callback_handler.callbacks if _is_active(callback)]


def _is_active(callback: object) -> bool:
    if isinstance(callback, TensorBoardCallback):
        return callback.tb_writer is not None
    return isinstance(callback, TrackioCallback | WandbCallback) and callback._initialized


def _draw(figure: Figure) -> Image.Image:
    png = BytesIO()
    figure.savefig(png, format="png", dpi=DPI)
    return Image.open(png).convert("RGB")


def _log_to_tensorboard(tracker: TensorBoardCallback, images: Images, step: int) -> None:
    for name, image in images.items():
        tracker.tb_writer.add_image(name, np.asarray(image), step, dataformats="HWC")
    tracker.tb_writer.flush()


def _log_to_wandb(tracker: WandbCallback, images: Images, step: int) -> None:
    wandb = tracker._wandb
    wandb.log({name: wandb.Image(image) for name, image in images.items()} | {STEP_KEY: step})


def _log_to_trackio(tracker: TrackioCallback, images: Images, step: int) -> None:
    trackio = tracker._trackio
    row = {name: trackio.Image(image) for name, image in images.items()}
    # Without a step trackio would count this row and shift all that follow. TRL logs its timings under optimizer
    # steps, so that trackio numbers rows by them; the row of this one is already there, and no later one moves.
    trackio.log(row | {STEP_KEY: step}, step=step)
