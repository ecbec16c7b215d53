"""The terminal as the commands use it."""

import warnings

from rich.console import Console
from transformers.utils import logging


def make_console() -> Console:
    """A console of our own, without the loading bars and the deprecations that TRL and transformers owe each other."""
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)
    return Console()
