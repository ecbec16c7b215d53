"""The instrument: whether a model's reasoning still depends on its input.

`reasoning` finds the reasoning in sampled token ids, `scoring` its log-probs under every prompt, `information` what
they say, and `diagnosis` goes all the way. Nothing here knows TRL or a task.
"""

from ragen2_trl.instrument.diagnosis import (
    SCOPES,
    Measurement,
    NotMeasurableError,
    Sampling,
    combine,
    measure_first_turn,
    measure_trajectory,
)
from ragen2_trl.instrument.information import (
    MarginalStdEMA,
    Regime,
    chance_p_value,
    classify_regime,
    information_metrics,
)
from ragen2_trl.instrument.reasoning import Trajectories, Turn, find_turns
from ragen2_trl.instrument.scoring import ContextLengthError, count_tokens, cross_score

__all__ = [
    "SCOPES",
    "ContextLengthError",
    "MarginalStdEMA",
    "Measurement",
    "NotMeasurableError",
    "Regime",
    "Sampling",
    "Trajectories",
    "Turn",
    "chance_p_value",
    "classify_regime",
    "combine",
    "count_tokens",
    "cross_score",
    "find_turns",
    "information_metrics",
    "measure_first_turn",
    "measure_trajectory",
]
