"""How a model plays several turns: the loop over any way to generate, and TRL's `rollout_func` made of it."""

from ragen2_trl.rollouts.chat import Chat, Messages
from ragen2_trl.rollouts.context import ContextWindow, TrainingSample, Trajectory
from ragen2_trl.rollouts.play import Generate, check_words_only, play_all
from ragen2_trl.rollouts.text_rollout import TextRollout

__all__ = [
    "Chat",
    "ContextWindow",
    "Generate",
    "Messages",
    "TextRollout",
    "TrainingSample",
    "Trajectory",
    "check_words_only",
    "play_all",
]
