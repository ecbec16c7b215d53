"""How a model plays several turns: the loop over any way to generate, and TRL's `rollout_func` made of it."""

from ragen2_trl.rollouts.play import Chat, Generate, Messages, Trajectory, check_words_only, play_all
from ragen2_trl.rollouts.text_rollout import TextRollout

__all__ = ["Chat", "Generate", "Messages", "TextRollout", "Trajectory", "check_words_only", "play_all"]
