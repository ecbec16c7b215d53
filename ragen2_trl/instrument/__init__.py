"""The instrument: whether a model's reasoning still depends on its input.

`reasoning` finds the reasoning in sampled token ids, `scoring` its log-probs under every prompt, `information` what
they say, and `diagnosis` goes all the way. `verdict` decides what that means, in the words of `wording`. Nothing here
knows TRL or a task.
"""

from ragen2_trl.instrument.diagnosis import (
    REFERENCE_SCOPE,
    SCOPES,
    Measurement,
    NotMeasurableError,
    Sampling,
    combine,
    measure_first_turn,
    measure_trajectory,
    measure_trajectory_reference,
)
from ragen2_trl.instrument.information import (
    MarginalStdEMA,
    chance_p_value,
    information_metrics,
)
from ragen2_trl.instrument.reasoning import Trajectories, Turn, find_turns
from ragen2_trl.instrument.scoring import ContextLengthError, count_tokens, cross_score
from ragen2_trl.instrument.verdict import Evidence, Finding, Regime, judge
from ragen2_trl.instrument.wording import headline, in_numbers

__all__ = [
    "REFERENCE_SCOPE",
    "SCOPES",
    "ContextLengthError",
    "Evidence",
    "Finding",
    "MarginalStdEMA",
    "Measurement",
    "NotMeasurableError",
    "Regime",
    "Sampling",
    "Trajectories",
    "Turn",
    "chance_p_value",
    "combine",
    "count_tokens",
    "cross_score",
    "find_turns",
    "headline",
    "in_numbers",
    "information_metrics",
    "judge",
    "measure_first_turn",
    "measure_trajectory",
    "measure_trajectory_reference",
]
