"""Whether training is failing, told from the rows that trainers log: what warned of it in real runs, and when.

A run is watched row by row with a few numbers kept for each key. What falls is compared with the best it has been, on
the scale on which a share of so many completions has the same error everywhere (arcsine), and only a fall that chance
does not explain is an alarm. The constants were fixed on 12 training runs of other people; what they say of 13 more is
in `research/results/real_runs.md`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypedDict, TypeGuard

Kind = Literal["format", "success", "length", "entropy", "gradient", "kl", "flat_rewards"]
KINDS: tuple[Kind, ...] = ("format", "success", "length", "entropy", "gradient", "kl", "flat_rewards")
FAILING: tuple[Kind, ...] = ("format", "success")  # the others are worth a look: healthy runs have had them

# Between 0.4 and 0.8 the same of the 12 runs are caught and no healthy one is accused; 1.0 -> 0.91, 0.4 -> 0.14.
FALL = 0.6  # of a share whose loss is failure by itself, as Cohen's h: twice the distance on the arcsine scale
HALF = 0.5  # of its best, for what goes up and down in healthy runs too: success, completions that end by themselves
SURE = 5.0  # standard errors: the best and the worst of some hundred windows lie four apart by chance
COMPLETIONS = 16  # in a row that does not say how many; fewer than most have, so that chance is given more room
VARIED = 0.05  # share of groups with reward variance that is as good as none
MAX_KEYS = 1024  # that are remembered: of a log that anyone may have written
LARGEST = 1e100  # of a number; what is larger counts as not finite, as its square would not be
COUNT = "health/completions"  # log key of how many completions a row is about

Scale = Literal["share", "ratio", "plain"]


@dataclass(frozen=True)
class Signal:
    """What a log key tells.

    Args:
        kind: Of the alarm.
        what: In words.
        rows: How many are averaged: few of measurements that are made now and then.
        scale: `share` of completions, of which more is better; `ratio`, a positive quantity, of which more is worse;
            `plain`, of which more is better.
        least: Of a share, Cohen's h that is an alarm, 0 for half of its best; of a ratio, its factor.
        floor: What smaller values of a ratio are taken for.
    """

    kind: Kind
    what: str
    rows: int = 5
    scale: Scale = "share"
    least: float = 0.0
    floor: float = 0.0

    def scaled(self, value: float) -> float:
        """On a scale on which more is better and chance is the same everywhere: a share of n completions has a
        standard error of 1/(2 sqrt n) on the arcsine scale."""
        if self.scale == "plain":
            return value
        return math.asin(math.sqrt(value)) if self.scale == "share" else -math.log(max(value, self.floor))

    @property
    def distance(self) -> float:
        """The least distance that is an alarm, on that scale."""
        return math.log(self.least) if self.scale == "ratio" else self.least / 2


SIGNALS = {
    "valid": Signal("format", "valid answers", least=FALL),
    "valid_thinking": Signal("format", "closed reasoning", rows=2, least=FALL),
    "not_clipped": Signal("format", "completions that end before the length limit"),
    "success": Signal("success", "success", rows=10),
    "held_out_success": Signal("success", "held-out success", rows=2),
    "reward": Signal("success", "reward", rows=10, scale="plain"),
    "varied": Signal("flat_rewards", "groups whose rewards differ", rows=20),
    "length": Signal("length", "mean length", scale="ratio", least=2.0, floor=16.0),
    "entropy": Signal("entropy", "entropy", scale="ratio", least=3.0, floor=0.1),
    "grad_norm": Signal("gradient", "gradient norm", scale="ratio", least=10.0, floor=1e-6),
    "kl": Signal("kl", "KL divergence", scale="ratio", least=10.0, floor=0.1),
}
# What is logged as its complement.
COMPLEMENTS = {"clipped": "not_clipped", "zero_variance": "varied"}

# Log keys, `*` for a name: ours and TRL's, then those of verl and of the paper's code.
KEYS = {
    "health/valid_rate": "valid",
    "env/*/valid_rate": "valid",
    "env/*/action_is_valid": "valid",
    "mi/valid_thinking_rate": "valid_thinking",
    "completions/clipped_ratio": "clipped",
    "completions/mean_length": "length",
    "env/*/success": "success",
    "eval/env/*/success": "held_out_success",
    "eval_env/*/success": "held_out_success",
    "reward": "reward",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "kl": "kl",
    "snr/zero_variance_fraction": "zero_variance",
    "frac_reward_zero_std": "zero_variance",
    "train/*/action_is_valid": "valid",
    "collapse/valid_thinking_rate": "valid_thinking",
    "response_length/clip_ratio": "clipped",
    "response_length/mean": "length",
    "train/*/success": "success",
    "val-env/*/success": "held_out_success",
    "critic/score/mean": "reward",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/ppo_kl": "kl",
}


@dataclass(frozen=True)
class Alarm:
    """Something has begun that a person should know of.

    Args:
        step: Optimizer step of the row that told it.
        kind: One of `KINDS`.
        key: Log key that told it.
        what: What that key is, in words.
        value: Mean of the latest rows; `None` of a gradient that is not finite.
        best: What it is compared with: the best such mean of the run, of what has risen the lowest, of reward the
            first.
        best_step: Optimizer step of that.
        share: Whether they are shares.
        until: Optimizer step at which it was over; `None` as long as it is not.
    """

    step: int
    kind: Kind
    key: str
    what: str
    value: float | None
    best: float | None
    best_step: int
    share: bool
    until: int | None = None

    @property
    def failing(self) -> bool:
        """Whether training fails; otherwise it is worth a look, and healthy runs have had it."""
        return self.kind in FAILING

    @property
    def sentence(self) -> str:
        """For people.

        >>> Alarm(118, "format", "env/sokoban/valid_rate", "valid answers", 0.83, 0.99, 100, True).sentence
        'Training is failing since step 118: valid answers down to 83% from 99% at step 100 (env/sokoban/valid_rate).'
        """
        over = "" if self.until is None else f" to {self.until}"
        since = f"{'from' if over else 'since'} step {self.step}{over}"
        if self.value is None or self.best is None:
            said = f"{self.what} is not finite"
        elif self.kind == "flat_rewards":
            said = f"only {self.value:.0%} of groups have rewards that differ; the others have no advantage"
        else:
            way = "down" if self.failing else "up"
            value, best = (f"{x:.0%}" if self.share else f"{x:.3g}" for x in (self.value, self.best))
            said = f"{self.what} {way} to {value} from {best} at step {self.best_step}"
        verb = "was" if over else "is"
        return f"{f'Training {verb} failing' if self.failing else 'Worth a look'} {since}: {said} ({self.key})."


class Health:
    """Watches one run, row by row; what it keeps does not grow.

    Args:
        keys: Further log keys, `*` for a part between slashes, by the names in `SIGNALS` and `COMPLEMENTS`.
        completions: How many a row is about where it does not say so (`health/completions`).

    Raises:
        ValueError: If a key is mapped to another name, or `completions` is below 1.
    """

    def __init__(self, keys: Mapping[str, str] | None = None, completions: int = COMPLETIONS):
        names = (*SIGNALS, *COMPLEMENTS)
        for key, name in (keys or {}).items():
            if name not in names:
                raise ValueError(f"keys[{key!r}] must be one of {names}, got {name!r}")
        if completions < 1:
            raise ValueError(f"completions must be at least 1, got {completions!r}")
        self.keys = {**KEYS, **(keys or {})}
        self.completions = completions
        self.alarms: dict[Kind, Alarm] = {}  # those that stand
        self._watched: dict[str, _Watch] = {}
        self._names: dict[str, str | None] = {}
        self._step = -1

    @property
    def is_failing(self) -> bool:
        return any(alarm.failing for alarm in self.alarms.values())

    def update(self, row: Mapping[str, Any]) -> list[Alarm]:
        """Takes in a log row; gives the alarms that begin with it, and those that end, which have `until`.

        A row of an earlier step than the last is of a run that has been repeated from there, and is left out, as is
        what is no number.
        """
        step = row.get("step", self._step + 1)
        if not is_number(step) or step < self._step:
            return []
        self._step = int(step)
        completions = row.get(COUNT, self.completions)
        count = int(completions) if is_number(completions) and completions >= 1 else self.completions
        changed: list[Alarm] = []
        for key, value in row.items():
            name = self.name_of(key)
            if name is None or not isinstance(value, int | float):
                continue
            signal = SIGNALS[COMPLEMENTS.get(name, name)]
            if not is_number(value):
                if name == "grad_norm":
                    self._begin(Alarm(self._step, signal.kind, key, signal.what, None, None, 0, False), changed)
                continue
            if key not in self._watched and len(self._watched) >= MAX_KEYS:
                continue
            watch = self._watched.setdefault(key, _Watch())
            is_possible = signal.scale != "share" or 0 <= value <= 1
            if watch.step == self._step or not is_possible:  # a row that comes twice, or nonsense
                continue
            watch.take(signal, 1 - value if name in COMPLEMENTS else float(value), self._step, count)
            if watch.is_low:
                told = (watch.level, watch.best, watch.best_step, signal.scale == "share")
                self._begin(Alarm(self._step, signal.kind, key, signal.what, *told), changed)
            elif (alarm := self.alarms.get(signal.kind)) is not None and alarm.key == key:
                del self.alarms[signal.kind]
                changed.append(replace(alarm, until=self._step))
        return changed

    def name_of(self, key: str) -> str | None:
        """What a log key tells; later patterns win."""
        if key not in self._names:
            if len(self._names) >= MAX_KEYS:
                self._names.clear()
            fits = [name for pattern, name in self.keys.items() if _fits(pattern.split("/"), key.split("/"))]
            self._names[key] = fits[-1] if fits else None
        return self._names[key]

    def _begin(self, alarm: Alarm, changed: list[Alarm]) -> None:
        if alarm.kind not in self.alarms:
            self.alarms[alarm.kind] = alarm
            changed.append(alarm)

    @property
    def state(self) -> dict[str, Any]:
        """Numbers, texts and lists, for a checkpoint: `HealthState`."""
        watched = {key: asdict(watch) for key, watch in self._watched.items()}
        return {"step": self._step, "alarms": [asdict(one) for one in self.alarms.values()], "watched": watched}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self._step = state["step"]
        self.alarms = {one["kind"]: Alarm(**one) for one in state["alarms"]}
        self._watched = {key: _Watch(**one) for key, one in state["watched"].items()}


def health(
    rows: Iterable[Mapping[str, Any]], keys: Mapping[str, str] | None = None, completions: int = COMPLETIONS
) -> list[Alarm]:
    """Every alarm of a run, in the order in which they began.

    Args:
        rows: Of a log, in their order: any of the keys in `KEYS`, each where it is known.
        keys, completions: See `Health`.

    >>> rows = [{"step": s, "env/sokoban/valid_rate": 0.98 if s < 50 else 0.6} for s in range(60)]
    >>> [(alarm.step, alarm.kind) for alarm in health(rows, completions=128)]
    [(52, 'format')]
    """
    return told_by(Health(keys, completions), rows)


def told_by(watch: Health, rows: Iterable[Mapping[str, Any]]) -> list[Alarm]:
    """Every alarm of further rows, in the order in which they began, each as it was last told."""
    found: dict[tuple[int, Kind], Alarm] = {}
    for row in rows:
        found |= {(alarm.step, alarm.kind): alarm for alarm in watch.update(row)}
    return list(found.values())


@dataclass
class _Watch:
    """One log key over a run: its latest values, their mean, the best such mean, and how much rows differ."""

    step: int = -1
    window: list[float] = field(default_factory=list)
    level: float | None = None
    best: float | None = None
    best_step: int = 0
    is_low: bool = False
    rows: int = 0
    squares: float = 0.0  # sum of squared differences of rows that follow one another, scaled
    counts: int = 0  # completions of all rows, whose mean is what chance is told by

    def take(self, signal: Signal, value: float, step: int, count: int) -> None:
        if self.window:
            self.squares += (signal.scaled(value) - signal.scaled(self.window[-1])) ** 2
        self.step, self.rows, self.counts = step, self.rows + 1, self.counts + count
        self.window = [*self.window, value][-signal.rows :]
        if len(self.window) < signal.rows:
            return
        level = self.level = math.fsum(self.window) / signal.rows
        # Reward is compared with its start, which it falls below only if all that was learnt is lost.
        if self.best is None or (signal.scale != "plain" and signal.scaled(level) > signal.scaled(self.best)):
            self.best, self.best_step = level, step
        self.is_low = self._is_low(signal, level, self.best)

    def _is_low(self, signal: Signal, level: float, best: float) -> bool:
        if signal.kind == "flat_rewards":
            return level < VARIED
        spread = math.sqrt(self.squares / (2 * (self.rows - 1)))
        if signal.scale == "share":
            spread = max(spread, 0.5 / math.sqrt(self.counts / self.rows))
        elif self.rows < 2 * signal.rows or spread == 0:  # too few to tell how much rows differ, or all the same
            return False
        least = max(signal.distance, SURE * spread * math.sqrt(2 / signal.rows))
        distance = signal.scaled(best) - signal.scaled(level)
        if self.is_low:  # over once it is halfway back
            return distance >= least / 2
        halved = signal.scale != "share" or signal.least > 0 or level <= HALF * best
        return distance >= least and halved


class HealthState(TypedDict):
    """The form of `Health.state`, whose dataclasses are dictionaries."""

    step: int
    alarms: list[Alarm]
    watched: dict[str, _Watch]


def _fits(pattern: list[str], key: list[str]) -> bool:
    return len(pattern) == len(key) and all(want in ("*", part) for want, part in zip(pattern, key, strict=True))


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a log can be computed with: neither NaN nor so large that a scale for it would overflow."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
