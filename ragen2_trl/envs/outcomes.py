"""What came of episodes, and the means that training logs of them."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(frozen=True)
class EpisodeOutcome:
    """What came of an episode; rollouts hand outcomes to reward functions in the column `EPISODE`.

    Args:
        episode_return: Sum of the rewards, invalid turns included.
        success: Whether the task was solved.
        turns: Turns taken.
        valid_turns: Those with a well-formed response that named known actions and nothing else.
        num_actions: Actions that were carried out.
        acting_turns: Turns in which one was.
        effective_turns: Turns whose last one changed the state, or ended the episode.
        measures: Further numbers of the task's own, 0.0 to 1.0.
        failure: Task, row, turn and exception of an episode that was ended by one: it has no reward.
    """

    episode_return: float
    success: bool
    turns: int
    valid_turns: int
    num_actions: int = 0
    acting_turns: int = 0
    effective_turns: int = 0
    measures: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


def mean_outcomes(outcomes: Sequence[EpisodeOutcome], tasks: Sequence[Hashable]) -> dict[str, float]:
    """Means over episodes, and `pass@k` where each of the tasks, told apart by `tasks`, was played k times.

    Episodes that have failed are left out of all but `failed`, their share.
    """
    played = [(outcome, task) for outcome, task in zip(outcomes, tasks, strict=True) if outcome.failure is None]
    failed = {"failed": 1 - len(played) / len(outcomes)}
    if not played:
        return failed
    outcomes = [outcome for outcome, _ in played]
    groups: defaultdict[Hashable, list[bool]] = defaultdict(list)
    for outcome, task in played:
        groups[task].append(outcome.success)
    turns = sum(outcome.turns for outcome in outcomes)
    means = {
        **failed,
        "success": fmean(outcome.success for outcome in outcomes),
        "return": fmean(outcome.episode_return for outcome in outcomes),
        "turns": turns / len(outcomes),
        "valid_rate": sum(outcome.valid_turns for outcome in outcomes) / max(1, turns),
        # As RAGEN's code logs them: of each episode the mean over its turns, then the mean over episodes.
        "num_actions": fmean(outcome.num_actions for outcome in outcomes),
        "action_is_valid": fmean(outcome.acting_turns / max(1, outcome.turns) for outcome in outcomes),
        "action_is_effective": fmean(outcome.effective_turns / max(1, outcome.turns) for outcome in outcomes),
    }
    shared = [name for name in outcomes[0].measures if all(name in outcome.measures for outcome in outcomes)]
    means.update({name: fmean(outcome.measures[name] for outcome in outcomes) for name in shared})
    sizes = {len(members) for members in groups.values()}
    if len(sizes) == 1:  # elsewhere a group is spread over processes, and k would differ from task to task
        k = sizes.pop()
        means[f"pass@{k}"] = fmean(pass_at_k(k, sum(members), k) for members in groups.values())
    return means


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right when c of n were (arXiv 2107.03374).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
