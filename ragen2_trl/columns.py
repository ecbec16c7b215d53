"""Names of dataset columns that rollouts, tasks and trainers hand to one another."""

TASK = "environment"
"""Whose task a row is, in datasets of several tasks; TRL's name for it."""

ALL_TASKS = "all"
"""Under which metrics of all episodes are logged; it sorts before the name of every task."""

EPISODE = "episode"
"""Under which rollout functions hand what came of an episode to reward functions."""

TURN_REWARDS = "turn_rewards"
"""Under which rollout functions hand on the rewards of an episode's turns."""

TURN_SAMPLES = "turn_samples"
"""Under which rollout functions hand on the training samples of an episode after its first: turns that were sampled
from a context of their own."""

SUCCESS = "success"
"""Under which tasks log, for each completion, whether it solved its task, 1.0 or 0.0."""

GENERATION = "generation"
"""In saved completions, the number of their generation in the run, from 1 as `snr/generation`; none in evaluations."""

REQUIRED = "required"
"""Attribute of reward functions without whose reward a completion has none, whatever other functions give it."""

# In `TrainerState.stateful_callbacks`, which every checkpoint carries: what the filter has saved so far.
