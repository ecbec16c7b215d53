"""The instrument tells whether a model's reasoning still depends on its input.

`reasoning` finds the reasoning in sampled token ids, `scoring` its log-probs under every prompt, `information` what
they say, and `diagnosis` goes all the way; `verdict` decides what the measurements of a run mean. `answers` tells
whether answers use their prompt and their reasoning. `health` tells whether training is learning, flat, drifting or
failing, which is another question. `findings` words all of it. Nothing here knows TRL or a task.
"""

from ragen2_trl.instrument.answers import Answer, AnswerEvidence, find_answer, measure_answers
from ragen2_trl.instrument.diagnosis import (
    SCOPES,
    Measurement,
    NotMeasurableError,
    Sampling,
    combine,
    measure_first_turn,
    measure_trajectory,
)
from ragen2_trl.instrument.findings import Finding, answer_findings, reasoning_finding, training_finding
from ragen2_trl.instrument.health import Health, State, health
from ragen2_trl.instrument.information import MarginalStdEMA, information_metrics
from ragen2_trl.instrument.reasoning import Trajectories, Turn, find_turns
from ragen2_trl.instrument.scoring import ContextLengthError, count_tokens, cross_score
from ragen2_trl.instrument.verdict import Evidence, Judgement, Regime, chance_p_value, judge

__all__ = [
    "SCOPES",
    "Answer",
    "AnswerEvidence",
    "ContextLengthError",
    "Evidence",
    "Finding",
    "Health",
    "Judgement",
    "MarginalStdEMA",
    "Measurement",
    "NotMeasurableError",
    "Regime",
    "Sampling",
    "State",
    "Trajectories",
    "Turn",
    "answer_findings",
    "chance_p_value",
    "combine",
    "count_tokens",
    "cross_score",
    "find_answer",
    "find_turns",
    "health",
    "information_metrics",
    "judge",
    "measure_answers",
    "measure_first_turn",
    "measure_trajectory",
    "reasoning_finding",
    "training_finding",
]
