"""What a training is doing, told from the rows that trainers log: one state at a time, since when, and why.

A run is followed row by row with a few numbers for each key. A quantity is *beyond its limit* when it lies a fixed
distance below its best level of five rows, in every one of three rows; the limits were chosen with 25 published runs
in sight (`research/results/real_runs.md`).

Rows that reuse a generation count once, as one row whose value is their mean. A row begins a generation if it has
another number of it (`snr/generation`) than the row before or, without that number, if it has a reward or the log has
none so far: TRL logs rewards only at steps that sample. A row that averages k steps (`logging_steps`) counts as their
generations: by their numbers, else k divided by the steps of a generation, which is taken as TRL's default of one.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from operator import mul
from typing import Any, Literal, NotRequired, TypedDict, TypeGuard

from ragen2_trl.metrics import GENERATION, METRICS

Name = Literal["failing", "nothing_to_learn", "drifting", "learning", "no_rise", "too_early"]
TITLES: dict[Name, str] = {  # in their precedence
    "failing": "failing",
    "nothing_to_learn": "flat (nothing to learn from)",
    "drifting": "drifting",
    "learning": "learning",
    "no_rise": "flat (no rise shown)",
    "too_early": "too early to tell",
}

LEVEL, RUNNING, MIN_ROWS = 5, 3, 10  # rows of a level; rows that all lie beyond; rows before a limit holds
SPAN, BLOCK, MIN_FLAT = 20, 10, 60  # rows at start and end that show a rise; for its noise; that show none
SURE = 3 * math.sqrt(2)  # standard errors of a mean over SPAN rows: three of a difference of two such means
NOISE = 5.0  # standard deviations of a row, for success and reward, which differ between prompts as well
SPREAD = 0.9  # standard deviations of rewards: the fall of a share from 0.45 to 0
NO_SIGNAL = 0.95  # share of groups without reward variance at which a row teaches nothing
SAME = 1e-6  # relative difference that rounding makes
COMPLETIONS = 16  # in a row that does not say how many; fewer than most have, so that chance is given more room
MAX_KEYS = 1024  # log keys remembered: anyone may have written the log
MAX_HISTORY = 50  # states remembered, the latest
LARGEST = 1e100  # larger numbers count as not finite: their squares would not be
COUNT = "health/completions"  # log key of the completions in a row
OF_THE_GRADIENT = ("grad_norm", "clip_ratio")  # 0 by construction where no group has an advantage

CAUSES = {  # why generations teach nothing, in the precedence of `why_flat`; what to do is in `findings`
    "unrewarded": "No reward function returned a finite number",
    "cut": "All completions are cut at the length limit",
    "unanswered": "No completion holds a valid answer",
    "unsolved": "No completion solves its task",
    "solved": "All completions solve their tasks",
    "unselected": "The filter keeps no group",
    "equal": "Every group got the same reward",
    "alike": "All completions of a group get the same reward",
}


@dataclass(frozen=True)
class Signal:
    """A quantity that is watched.

    Args:
        state: The state of a run where it is beyond its limit.
        what: In words.
        limit: Distance from the best level, on its scale.
        scale: `share`, better when high, by its arcsine, on which chance is the same everywhere; `rising_share`,
            better when low; `rising`, a positive quantity that is better when low, by its logarithm; `plain`.
        floor: Smaller values of a rising quantity count as this.
        chance: What sets the limit where it is larger: the number of `completions`, the noise of `rows`, or neither.
    """

    state: Literal["failing", "drifting"]
    what: str
    limit: float
    scale: Literal["share", "rising_share", "rising", "plain"] = "share"
    floor: float = 0.0
    chance: Literal["completions", "rows", "none"] = "none"

    def scaled(self, value: float) -> float:
        """On a scale where more is better."""
        if self.scale == "plain":
            return value
        if self.scale == "rising":
            return -math.log(max(value, self.floor))
        return math.asin(math.sqrt(value)) * (1 if self.scale == "share" else -1)

    def texts(self, latest: float, best: float) -> tuple[str, str]:
        """Two scaled levels as the quantity itself, in digits that tell them apart."""
        if "share" in self.scale:
            return f"{math.sin(latest) ** 2:.0%}", f"{math.sin(best) ** 2:.0%}"
        one, other = (math.exp(-level) if self.scale == "rising" else level for level in (latest, best))
        digits = _digits(one, other)
        return f"{one:.{digits}g}", f"{other:.{digits}g}"


SIGNALS = {
    "valid": Signal("failing", "valid answers", 0.46, chance="completions"),
    "valid_thinking": Signal("failing", "closed reasoning", 0.45, chance="completions"),
    "success": Signal("failing", "success", 0.46, chance="rows"),
    "held_out_success": Signal("failing", "held-out success", 0.46, chance="rows"),
    "reward": Signal("failing", "reward", 0.0, "plain", chance="rows"),
    "length": Signal("drifting", "mean length", 1.1, "rising", 16.0),
    "entropy": Signal("drifting", "entropy", 1.5, "rising", 0.1),
    "grad_norm": Signal("drifting", "gradient norm", 2.65, "rising", 1e-3),
    "clip_ratio": Signal("drifting", "clip ratio", 0.19, "rising_share"),
}
FACTS = ("zero_variance", "reward_std", "kept", "clipped")  # whether a row teaches anything, and why it does not
NAMES = (*SIGNALS, *FACTS)

# Log keys, `*` for a name: the registry's, then keys of TRL's evaluations, verl, the paper's code, OpenRLHF, prime-rl.
KEYS = {re.sub(r"\{\w+\}", "*", one.name.replace("{bound}", "")): one.health for one in METRICS if one.health} | {
    "eval_env/*/success": "held_out_success",
    "train/*/action_is_valid": "valid",
    "collapse/valid_thinking_rate": "valid_thinking",
    "response_length/clip_ratio": "clipped",
    "response_length/mean": "length",
    "train/*/success": "success",
    "val-env/*/success": "held_out_success",
    "critic/score/mean": "reward",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/pg_clipfrac": "clip_ratio",
    "response_length": "length",
    "response_clip_ratio": "clipped",
    "ppo_clip_ratio": "clip_ratio",
    "reward/mean": "reward",
    "reward/all/mean": "reward",
    "seq_len/mean": "length",
    "is_truncated/mean": "clipped",
    "entropy/mean": "entropy",
    "optim/grad_norm": "grad_norm",
}


@dataclass(frozen=True)
class State:
    """What a training was doing from a step on.

    Args:
        name: A key of `TITLES`.
        since: Optimizer step of the row that told it.
        why: One sentence, of the latest row that it was true for.
        what: The quantity or cause in a few words; empty where the name says it all.
    """

    name: Name
    since: int
    why: str
    what: str = ""

    @property
    def title(self) -> str:
        return TITLES[self.name]

    @property
    def sentence(self) -> str:
        """For people.

        >>> State("failing", 118, "Valid answers fell to 61% from 99% at step 100 (env/sokoban/valid_rate).").sentence
        'Training: failing since step 118. Valid answers fell to 61% from 99% at step 100 (env/sokoban/valid_rate).'
        """
        since = "" if self.name == "too_early" else f" since step {self.since}"
        return f"Training: {self.title}{since}. {self.why}"


class Health:
    """Follows one run, row by row, in constant memory.

    Args:
        keys: Further log keys, `*` for a part between slashes, by the names in `NAMES`.
        completions: Completions of a row that does not log them (`health/completions`).
        steps_per_generation: Optimizer steps that train on one generation; `None` is taken as 1.

    Attributes:
        history: The states of the run in their order, the latest `MAX_HISTORY` of them; the last one is the present.

    Raises:
        ValueError: If a key is mapped to another name, or `completions` is below 1.
    """

    def __init__(
        self,
        keys: Mapping[str, str] | None = None,
        completions: int = COMPLETIONS,
        steps_per_generation: float | Fraction | None = None,
    ):
        for key, name in (keys or {}).items():
            if name not in NAMES:
                raise ValueError(f"keys[{key!r}] must be one of {NAMES}, got {name!r}")
        if completions < 1:
            raise ValueError(f"completions must be at least 1, got {completions!r}")
        self.keys = {**KEYS, **(keys or {})}
        self.completions = completions
        self.steps_per_generation = steps_per_generation
        self.history = [State("too_early", 0, "No rows yet.")]
        self._watches: dict[str, Watch] = {}
        self._progress = _Progress()
        self._flat: list[_Flat] = []  # the latest generations that teach nothing, LEVEL at most
        self._spread = (0.0, 0)  # sum and number of `reward_std`
        self._names: dict[str, str | None] = {}
        self._step = -1
        self._generation = -1  # step of the row that began the present one
        self._logged: int | None = None  # step of the latest row of training
        self.weight = 1.0  # generations that the latest row with one averages
        self._number: float | None = None  # of the present one, where rows have it
        self._has_reward = False  # whether a row had one
        self._is_flat = False  # whether the present generation teaches nothing

    @property
    def state(self) -> State:
        return self.history[-1]

    def update(self, row: Mapping[str, Any]) -> State | None:
        """Takes in a log row; gives the state that begins with it, if one does.

        A row of an earlier step than the last belongs to a run that was repeated from there, and is left out. So is
        every value that is no number.
        """
        step = self._step + 1 if row.get("step") is None else row["step"]
        if not is_number(step) or step < self._step:
            return None
        self._step = int(step)
        completions = row.get(COUNT, self.completions)
        count = int(completions) if is_number(completions) and completions >= 1 else self.completions
        told = list(self._told(row))
        facts: dict[str, float] = {}
        for _, name, value in told:
            facts[name] = max(value, facts.get(name, value))  # of several tasks the best
        is_new = self._begins_generation(row)
        self._note_flat(facts)
        if is_new and "reward_std" in facts:
            self._spread = (self._spread[0] + facts["reward_std"], self._spread[1] + 1)
        spread = self._spread[0] / max(self._spread[1], 1)
        for key, name, value in told:
            if name not in SIGNALS or (key not in self._watches and len(self._watches) >= MAX_KEYS):
                continue
            if name in OF_THE_GRADIENT and value < LARGEST and (self._is_flat or facts.get("grad_norm") == 0):
                continue
            unit = self._step if name == "held_out_success" else self._generation
            self._watches.setdefault(key, Watch()).take(SIGNALS[name], value, unit, self._step, count, spread)
        shown = "reward" if "reward" in facts else "success"
        if shown in facts:
            self._progress.take(shown, facts[shown], self._generation, self.weight)
        return self._become(self._judge())

    def _told(self, row: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
        """Key, name and value of each number that tells something; a gradient norm that is not finite is `LARGEST`."""
        for key, value in row.items():
            name = self.name_of(key)
            if name == "grad_norm" and isinstance(value, float) and not is_number(value):
                value = LARGEST
            if name is not None and is_number(value):
                yield key, name, float(value)

    def _begins_generation(self, row: Mapping[str, Any]) -> bool:
        number, former = row.get(GENERATION), self._number
        has_reward = any(self.name_of(key) == "reward" for key, value in row.items() if value is not None)
        self._has_reward |= has_reward
        if is_number(number):
            self._number = number
        is_new = number != former if is_number(number) else has_reward or not self._has_reward
        logged = self._logged
        if not any(key.startswith("eval") for key in row):
            self._logged = self._step
        if not is_new or self._step == self._generation:  # a row that comes twice
            return False
        self._generation, self._is_flat = self._step, False
        if is_number(number):
            self.weight = 1.0 if former is None else max(1.0, number - former)
        elif logged is not None:
            self.weight = max(1.0, (self._step - logged) / max(1.0, float(self.steps_per_generation or 1)))
        return True

    def name_of(self, key: str) -> str | None:
        """What a log key tells; later patterns win."""
        if key not in self._names:
            if len(self._names) >= MAX_KEYS:
                self._names.clear()
            fits = [name for pattern, name in self.keys.items() if _fits(pattern.split("/"), key.split("/"))]
            self._names[key] = fits[-1] if fits else None
        return self._names[key]

    def _note_flat(self, facts: Mapping[str, float]) -> None:
        if not facts.keys() & {"zero_variance", "reward_std", "kept"}:
            return
        same = facts.get("zero_variance", 0.0) >= NO_SIGNAL or facts.get("reward_std", 1.0) <= SAME
        self._is_flat = same or facts.get("kept") == 0
        if not self._is_flat:
            self._flat = []
        elif not self._flat or self._flat[-1].step < self._generation:
            clipped, success, reward = (facts.get(name) for name in ("clipped", "success", "reward"))
            one = _Flat(self._generation, same, clipped, success, reward, self.weight)
            self._flat = [*self._flat, one][-LEVEL:]

    def _judge(self) -> State:
        """The state after the latest row, in the order of `TITLES`."""
        beyond: dict[str, tuple[str, Watch]] = {}
        for key, watch in self._watches.items():
            signal = SIGNALS[self.name_of(key) or ""]
            if watch.beyond_since is not None:
                beyond.setdefault(signal.state, (key, watch))
        if "failing" in beyond:
            return self._fallen("failing", *beyond["failing"])
        if len(self._flat) > 1 and sum(row.weight for row in self._flat) >= LEVEL:  # a mean of several may be one's
            rows = self._flat
            cause = why_flat(
                all(row.same for row in rows),
                [row.reward for row in rows if row.reward is not None],
                [row.success for row in rows],
                [row.clipped for row in rows],
            )
            return State("nothing_to_learn", self._step, f"{cause}, for {LEVEL} generations or more.", cause)
        if "drifting" in beyond:
            return self._fallen("drifting", *beyond["drifting"])
        return self._progress.judged(self._step)

    def _fallen(self, name: Name, key: str, watch: "Watch") -> State:
        signal = SIGNALS[self.name_of(key) or ""]
        if watch.is_broken:
            said = f"{signal.what} is not finite"
        else:
            way = "rose" if "rising" in signal.scale else "fell"
            latest, best = signal.texts(watch.latest, watch.best_level or 0.0)
            said = f"{signal.what} {way} to {latest} from {best} at step {watch.best_step}"
        return State(name, self._step, f"{said[0].upper()}{said[1:]} ({key}).", signal.what)

    def _become(self, state: State) -> State | None:
        if state.name != self.state.name:
            self.history = [*self.history, state][-MAX_HISTORY:]
            return state
        if state.name not in ("failing", "drifting") or state.what != self.state.what:  # a fall is told as it began
            self.history[-1] = replace(state, since=self.state.since)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Numbers, texts and lists, for a checkpoint: `HealthState`."""
        return {
            "step": self._step,
            "generation": self._generation,
            "number": self._number,
            "logged": self._logged,
            "has_reward": self._has_reward,
            "is_flat": self._is_flat,
            "history": [asdict(one) for one in self.history],
            "watches": {key: asdict(watch) for key, watch in self._watches.items()},
            "progress": asdict(self._progress),
            "flat": [asdict(one) for one in self._flat],
            "spread": list(self._spread),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self._step, self._generation, self._number = (state[name] for name in ("step", "generation", "number"))
        self._has_reward, self._is_flat = state["has_reward"], state["is_flat"]
        self._logged = state.get("logged", self._step)
        self.history = [State(**one) for one in state["history"]]
        self._watches = {key: Watch(**one) for key, one in state["watches"].items() if self.name_of(key) in SIGNALS}
        self._progress = _Progress(**state["progress"])
        self._flat = [_Flat(**one) for one in state["flat"]]
        self._spread = (state["spread"][0], int(state["spread"][1]))


def health(
    rows: Iterable[Mapping[str, Any]],
    keys: Mapping[str, str] | None = None,
    completions: int = COMPLETIONS,
    steps_per_generation: float | Fraction | None = None,
) -> Health:
    """The state of a run after all its rows, and the history of its states.

    Args:
        rows: The rows of a log in their order, with any of the keys in `KEYS`.
        keys, completions, steps_per_generation: See `Health`.

    >>> rows = [{"step": s, "env/sokoban/valid_rate": 0.98 if s < 50 else 0.3} for s in range(60)]
    >>> print(health(rows, completions=128).state.sentence)
    Training: failing since step 52. Valid answers fell to 30% from 98% at step 4 (env/sokoban/valid_rate).
    """
    watch = Health(keys, completions, steps_per_generation)
    for row in rows:
        watch.update(row)
    return watch


@dataclass
class Watch:
    """One log key over a run: its latest values, its best level, and how much its rows differ.

    A row is here all rows of one generation; its value is their mean. All levels are scaled.
    """

    step: int = -1
    unit: int = -1  # the latest generation, or the step of a held-out evaluation
    values: int = 0  # of the latest generation
    window: list[float] = field(default_factory=list)
    best_level: float | None = None
    best_step: int = 0
    beyond_since: int | None = None
    broken: list[bool] = field(default_factory=list)  # whether each of the latest values, LEVEL at most, is not finite
    is_broken: bool = False
    rows: int = 0
    squares: float = 0.0  # sum of squared differences between neighbouring rows
    counts: int = 0  # completions of all rows

    @property
    def level(self) -> float:
        return math.fsum(self.window) / LEVEL

    @property
    def latest(self) -> float:
        """What is told of a fall: the worse one of the two means that can make it last."""
        return min(math.fsum(self.window[-RUNNING:]) / RUNNING, self.level)

    def take(self, signal: Signal, value: float, unit: int, step: int, count: int, spread: float) -> None:
        if step == self.step or ("share" in signal.scale and not 0 <= value <= 1):  # a row that comes twice, nonsense
            return
        self.broken = [*self.broken, signal.scale == "rising" and value >= LARGEST][-LEVEL:]
        if not self.broken[-1]:
            self._add(signal.scaled(value), unit, count)
        self.step = step
        starts = len(self.broken) >= RUNNING and all(self.broken[-RUNNING:])
        self.is_broken = starts or (self.is_broken and any(self.broken))
        limit, best = self._limit(signal, spread), self.best_level
        if self.is_broken:
            self.beyond_since = step if self.beyond_since is None else self.beyond_since
        elif best is None or self.rows < MIN_ROWS:
            self.beyond_since = None
        elif self.beyond_since is None:
            self.beyond_since = step if best - max(self.window[-RUNNING:]) > limit else None
        elif best - self.level < limit / 2:  # halfway back
            self.beyond_since = None

    def _add(self, scaled: float, unit: int, count: int) -> None:
        """Another value of the present generation, or the first of the next one, which ends the present."""
        if unit == self.unit:
            self.values += 1
            self.window[-1] += (scaled - self.window[-1]) / self.values
            return
        if len(self.window) == LEVEL and (self.best_level is None or self.level > self.best_level):
            self.best_level, self.best_step = self.level, self.step
        if self.window:
            self.squares += (scaled - self.window[-1]) ** 2
        self.unit, self.values = unit, 1
        self.window = [*self.window, scaled][-LEVEL:]
        self.rows, self.counts = self.rows + 1, self.counts + count

    def _limit(self, signal: Signal, spread: float) -> float:
        if signal.chance == "none":
            return signal.limit
        if signal.chance == "completions":
            return max(signal.limit, 0.35 + 1.1 / math.sqrt(self.counts / self.rows))
        noise = NOISE * math.sqrt(self.squares / (2 * max(self.rows - 1, 1)))
        if signal.scale != "plain":
            return max(signal.limit, noise)
        return max(SPREAD * spread, noise) if spread > SAME * max(1.0, abs(self.best_level or 0.0)) else math.inf


@dataclass
class _Progress:
    """Whether mean reward, or success where no reward is logged, has risen between the first and the last generations.

    A row may average several generations, its weight: it is as much less noisy.
    """

    what: str = ""
    step: int = -1
    rows: int = 0
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    best: float | None = None  # mean of SPAN generations
    best_step: int = 0
    squares: float = 0.0  # sum of squared differences between neighbouring rows, each as of single generations
    block: float | None = None  # mean of the last whole block, of BLOCK generations
    rises: bool = False
    block_squares: float = 0.0  # sum of squared differences between neighbouring blocks, which drift shows in
    first_weights: list[float] = field(default_factory=list)
    last_weights: list[float] = field(default_factory=list)
    generations: float = 0.0
    blocks: int = 0
    block_weight: float = BLOCK
    opened: int = 0  # rows since the last whole block

    def __post_init__(self) -> None:
        if len(self.last_weights) < len(self.last):  # of a checkpoint from before rows had weights
            self.first_weights, self.last_weights = [1.0] * len(self.first), [1.0] * len(self.last)
            self.generations, self.blocks, self.opened = self.rows, self.rows // BLOCK, self.rows % BLOCK

    def take(self, what: str, value: float, step: int, weight: float = 1.0) -> None:
        self.what = self.what or what
        if what != self.what or step == self.step:
            return
        if self.last:
            self.squares += 2 * (value - self.last[-1]) ** 2 / (1 / weight + 1 / self.last_weights[-1])
        self.step, self.rows, self.generations = step, self.rows + 1, self.generations + weight
        if sum(self.first_weights) < SPAN:
            self.first, self.first_weights = [*self.first, value], [*self.first_weights, weight]
        self.last, self.last_weights = [*self.last, value], [*self.last_weights, weight]
        while sum(self.last_weights[1:]) >= SPAN:
            self.last, self.last_weights = self.last[1:], self.last_weights[1:]
        mean = _mean(self.last, self.last_weights)
        if sum(self.last_weights) >= SPAN and (self.best is None or mean > self.best):
            self.best, self.best_step = mean, step
        self.opened += 1
        opened = self.last_weights[-self.opened :]
        if sum(opened) >= BLOCK:
            block = _mean(self.last[-self.opened :], opened)
            if self.block is not None:
                scale = 2 / (BLOCK / sum(opened) + BLOCK / self.block_weight)
                self.block_squares += scale * (block - self.block) ** 2
            self.block, self.block_weight, self.blocks, self.opened = block, sum(opened), self.blocks + 1, 0

    def judged(self, step: int) -> State:
        if self.generations < 2 * SPAN or self.rows < MIN_ROWS or self.best is None:
            return self._too_early(step)
        before, after = _mean(self.first, self.first_weights), _mean(self.last, self.last_weights)
        needed = max(SURE * self._standard_error(), SAME * max(1.0, abs(before)))
        is_undone = after - before < (self.best - before) / 2
        # Half of the rise keeps the state, so that a run near the bound does not change it with every row.
        self.rises = after - before > needed / (2 if self.rises else 1) and not is_undone
        if not self.rises and self.generations < MIN_FLAT:
            return self._too_early(step)
        was_risen = self.best - before > needed
        digits = _digits(before, after) if self.rises else _digits(self.best, max(before, after)) if was_risen else 3
        means = (
            f"mean {self.what} is {after:.{digits}g} in the last {SPAN} generations, {before:.{digits}g} in the first "
            f"{SPAN}"
        )
        if self.rises:
            return State("learning", step, f"{means[0].upper()}{means[1:]}.")
        if was_risen:
            rise = f"A rise to {self.best:.{digits}g} by step {self.best_step} was undone"
            return State("no_rise", step, f"{rise}: {means}.")
        return State(
            "no_rise", step, f"In {self.generations:.0f} generations {means}; a rise of {needed:.2g} would have shown."
        )

    def _too_early(self, step: int) -> State:
        why = (
            f"Generations with a reward: {self.generations:.0f}; a rise can show after {2 * SPAN}, its absence after "
            f"{MIN_FLAT}."
        )
        return State("too_early", step, why)

    def _standard_error(self) -> float:
        """Of a mean over SPAN rows, by differences between neighbouring rows or, if larger, neighbouring blocks."""
        by_rows = self.squares / (2 * (self.rows - 1)) / SPAN
        by_blocks = self.block_squares / (2 * max(self.blocks - 1, 1)) / (SPAN / BLOCK)
        return math.sqrt(max(by_rows, by_blocks))


@dataclass(frozen=True)
class _Flat:
    """A row that teaches nothing: whether rewards within its groups were the same, and what else it says."""

    step: int
    same: bool
    clipped: float | None
    success: float | None
    reward: float | None
    weight: float = 1.0  # generations


class HealthState(TypedDict):
    """The form of `Health.state_dict`, whose dataclasses are dictionaries."""

    step: int
    generation: int
    number: float | None
    logged: NotRequired[int | None]  # since rows of several generations count as these
    has_reward: bool
    is_flat: bool
    history: list[State]
    watches: dict[str, Watch]
    progress: _Progress
    flat: list[_Flat]
    spread: list[float]


def why_flat(
    same: bool,
    rewards: Sequence[float],
    success: Sequence[float | None],
    clipped: Sequence[float | None] = (),
    valid: Sequence[float | None] = (),
) -> str:
    """Why generations taught nothing: a text that begins with one of `CAUSES`.

    Args:
        same: Whether the rewards within every group were the same.
        rewards: Of these generations, their means or their extremes.
        success, clipped, valid: Shares of completions; `None` where one is not known.
    """
    if clipped and all(share is not None and share >= NO_SIGNAL for share in clipped):
        return CAUSES["cut"]
    if valid and all(share == 0 for share in valid):
        return CAUSES["unanswered"]
    if success and all(share == 0 for share in success):
        return CAUSES["unsolved"]
    if success and all(share is not None and share >= NO_SIGNAL for share in success):
        return CAUSES["solved"]
    if not same:
        return CAUSES["unselected"]
    if rewards and max(rewards) - min(rewards) <= SAME * max(1.0, abs(rewards[0])):
        return f"{CAUSES['equal']}, {rewards[-1]:.3g}"
    return CAUSES["alike"]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(map(mul, values, weights)) / sum(weights)


def _fits(pattern: list[str], key: list[str]) -> bool:
    return len(pattern) == len(key) and all(want in ("*", part) for want, part in zip(pattern, key, strict=True))


def _digits(one: float, other: float) -> int:
    """The fewest digits, from three on, that tell two numbers apart."""
    return next((digits for digits in range(3, 17) if f"{one:.{digits}g}" != f"{other:.{digits}g}"), 17)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a log can be computed with: neither NaN nor so large that its square would overflow."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
