"""Pilots: which prompts are worth their remaining completions, once a few of each are scored.

A filter saves the update once the samples are paid for; pilots save the samples, from the first epoch on. Pilot-Commit
(arXiv 2605.26606) and AERO (arXiv 2602.14338) continue where a pilot's rewards vary. Here a prompt is worth its
remaining completions if they buy at least as much expected reward variance as completions do on average, pilots
included.
"""

from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from ragen2_trl.sampling.posterior import Floats, Mask, PosteriorState, RewardPosterior, Rows, evidence_of

AUDIT = 0.02
"""Fraction of rejected prompts sampled in full anyway, to estimate the variance that rejection misses. At 70 % dead
prompts these are 4 % of all completions."""

MEMORY = 256  # rounds after which the findings of an audit count 1/e
RECENT = 256  # prompts whose expected variances set the threshold
_DRAW = 0xA0D1  # tells our draws from others of the same seed


def least_worth(expected: Floats, pilots: int, size: int) -> float:
    """Minimum expected variance for which sampling a prompt's remaining completions pays off: with this threshold,
    prompts like these yield most reward variance per completion.

    Args:
        expected: (n,) expected reward variances of prompts, given their pilots.
        pilots: completions of each, G0.
        size: of a group, G.

    >>> least_worth(np.array([0.2, 0.01, 0.01, 0.2]), pilots=3, size=16)
    0.2
    >>> least_worth(np.array([0.2, 0.16, 0.2, 0.2]), pilots=3, size=16)
    0.16
    """
    falling = np.sort(expected)[::-1]
    costs = len(falling) * pilots + np.arange(1, len(falling) + 1) * (size - pilots)
    return float(falling[(np.cumsum(falling) / costs).argmax()])


@dataclass(frozen=True)
class Choice:
    """The prompts of a round that are sampled in full.

    Args:
        in_full: (P,) bool.
        audited: (P,) bool, those of them that were not worth it, sampled to estimate what rejection misses.
    """

    in_full: Mask
    audited: Mask

    @property
    def committed(self) -> Mask:
        """(P,) bool, those that were worth it."""
        return self.in_full & ~self.audited


class PilotState(TypedDict):
    """State of `Pilots` in a checkpoint."""

    recent: list[float]
    held: list[float]
    posterior: PosteriorState


class Pilots:
    """Chooses prompts by the rewards of their pilots.

    Args:
        count: Completions of a pilot, G0.
        size: Of a group, G.
        groups: Most prompts sampled in full in a round, N: memory is that of TRL's batches.
        seed: Of the run.
        processes: Each of which samples as many prompts in full as every other.
    """

    def __init__(self, count: int, size: int, groups: int, seed: int, processes: int = 1):
        self.count, self.size, self.groups, self.seed, self.processes = count, size, groups, seed, processes
        self.posterior = RewardPosterior(0, 1.0)  # of all prompts together, where single ones are not known
        self.recent: list[float] = []  # expected variances
        self.held = np.zeros(3)  # audited groups, the variance that they stand for, and the variance of committed ones
        self.begin_step()

    def begin_step(self) -> None:
        self.sums = np.zeros(4)  # of the step: completions, places for them, committed prompts, prompts
        self.earned: list[float] = []  # rewards of pilots of the step

    def choose(
        self,
        rewards: Floats,
        key: tuple[int, ...],
        known: RewardPosterior | None = None,
        rows: Rows | None = None,
        fewest: int = 1,
    ) -> Choice:
        """The prompts that are worth their remaining completions, and audited ones, equally many on each process.

        Args:
            rewards: (P, G0) of pilots, process by process, NaN where there is none.
            key: tells this round's draws from others of the run.
            known, rows: what is known of single prompts, and (P,) the numbers of these there.
            fewest: prompts of each process that are chosen in any case.
        """
        expected = self._expected(rewards, known, rows)
        self.recent = [*self.recent, *expected.tolist()][-RECENT:]
        worth = expected >= least_worth(np.array(self.recent), self.count, self.size)
        rng = np.random.default_rng([_DRAW, self.seed, *key])
        audited = ~worth & (rng.random(len(expected)) < AUDIT)
        of_process = len(expected) // self.processes
        wanted = -(-int((worth | audited).sum()) // self.processes)
        number = min(max(fewest, wanted), self.groups // self.processes, of_process)
        # All processes generate equally often, so each continues with its own best prompts, after the audited ones.
        order = np.lexsort((-expected, ~audited))  # stable
        in_full = np.zeros(len(expected), dtype=bool)
        for process in range(self.processes):
            in_full[order[order // of_process == process][:number]] = True
        return Choice(in_full, audited & in_full)

    def _expected(self, rewards: Floats, known: RewardPosterior | None, rows: Rows | None) -> Floats:
        """(P,) expected reward variances of groups sampled in full."""
        further = self.size - self.count
        if known is not None and rows is not None:
            known.see(rewards)
            return known.group_variance(rewards, further, known.known(rows))
        self.posterior.see(rewards)
        self.posterior.learn_prior(rewards)
        return self.posterior.group_variance(rewards, further)

    def learn(self, rewards: Floats, choice: Choice) -> None:
        """Take in (P, G) rewards of a round, NaN for completions that were not sampled."""
        variances = evidence_of(rewards)[1]
        committed, in_full = choice.committed, int(choice.in_full.sum())
        found = [choice.audited.sum(), variances[choice.audited].sum() / AUDIT, variances[committed].sum()]
        self.held = self.held * (1 - 1 / MEMORY) + found
        completions = len(rewards) * self.count + in_full * (self.size - self.count)
        self.sums += [completions, rewards.size, committed.sum(), len(rewards)]
        of_pilots = rewards[:, : self.count]
        self.earned += of_pilots[~np.isnan(of_pilots)].tolist()

    def metrics(self) -> dict[str, float]:
        """Metrics of all rounds of a step; the missed variance is an estimate from the latest rounds."""
        completions, places, committed, prompts = self.sums.tolist()
        audited, missed, held = self.held.tolist()
        return {
            "sampled_completions": completions,
            "sampled_fraction": completions / places,
            "committed_fraction": committed / prompts,
            **({"pilot_reward": float(np.mean(self.earned))} if self.earned else {}),
            **({"missed_variance": missed / (missed + held)} if audited and missed + held else {}),
        }

    def state(self) -> PilotState:
        """State for a checkpoint, the same on every process."""
        return {"recent": self.recent, "held": self.held.tolist(), "posterior": self.posterior.state()}

    def load(self, state: PilotState) -> None:
        self.recent, self.held = list(state["recent"]), np.array(state["held"])
        self.posterior.load(state["posterior"])
