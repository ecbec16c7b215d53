"""What may be said of a run, as data: each sentence about training, reasoning, answers and their log stands here once.

Log lines, alerts, commands, the model card and the report print these findings, and word none themselves. It is not
said of reasoning that training fails: on real runs success has gone on rising while reasoning became a template.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any, Literal

from ragen2_trl.instrument.answers import AnswerEvidence
from ragen2_trl.instrument.health import CAUSES, COUNT, SIGNALS, Health, State, is_number
from ragen2_trl.instrument.verdict import (
    ALPHA,
    COLLAPSES,
    Evidence,
    Judgement,
    is_stale,
    upper_bound,
)
from ragen2_trl.messages import counted
from ragen2_trl.metrics import GENERATION

Kind = Literal["training", "reasoning", "answers", "data"]
Severity = Literal["good", "note", "warning", "failure"]

PAGES: dict[Kind, str] = {
    "training": "does_not_learn.md",
    "reasoning": "diagnosing.md#verdicts",
    "answers": "diagnosing.md#answers",
    "data": "does_not_learn.md#which-logs",
}
SECTIONS = {  # of does_not_learn.md, by name
    "failing": "failing",
    **dict.fromkeys(("nothing_to_learn", "nothing_learnt"), "nothing-to-learn-from"),
    "drifting": "drifting",
    "no_rise": "no-rise",
    "too_early": "too-early",
    **dict.fromkeys(COLLAPSES, "template"),
    "dead_groups": "which-setting-would-pay-off",
}
SEVERITIES: dict[str, Severity] = {  # by name; all others are notes
    "failing": "failure",
    **dict.fromkeys(("nothing_to_learn", "nothing_learnt", "drifting", "no_rise"), "warning"),
    "learning": "good",
    **dict.fromkeys((*COLLAPSES, "weaker", "stale", "foreign"), "warning"),
    **dict.fromkeys(("prompt_lost", "same_answers", "foreign_answers"), "warning"),
    **dict.fromkeys(("unreadable", "no_rows", "no_steps", "not_finite"), "warning"),
}
CUT_RATIO = 0.5  # share of completions cut at the length limit, from which that is said to be why nothing is closed
BECOME = {"template_collapse": "a template", "low_entropy_collapse": "nearly the same words for every prompt"}
LITTLE, MUCH = 0.25, 0.5  # bits; our own words for a scale that has no natural ones
LATEST, DEAD = 10, 0.2  # rows, and the least share of groups with equal rewards in them that is said
ALIKE = 0.9  # share of pairs of different prompts with the same answer that is said


@dataclass(frozen=True)
class Finding:
    """One thing that may be said of a run.

    Args:
        kind: What it is about.
        name: What was found, in one word for programs; of training a key of `health.TITLES`.
        severity: `good`, a `note`, a `warning` where a reader should look, or a `failure` of training.
        sentence: For people. It may hold text of others, such as log keys.
        since: Optimizer step at which it began; `None` where there is none.
        numbers: What it rests on, by the name of the metric; shares are fractions.
        advice: What to do about it, up to three lines with the settings to change.
    """

    kind: Kind
    name: str
    severity: Severity
    sentence: str
    since: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    advice: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        """Where it is explained, relative to `docs/`."""
        return f"does_not_learn.md#{SECTIONS[self.name]}" if self.name in SECTIONS else PAGES[self.kind]

    @property
    def text(self) -> str:
        """The sentence and the advice in one line."""
        return " ".join([self.sentence, *self.advice])

    @property
    def figures(self) -> str:
        """The numbers in one line."""
        return ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in self.numbers.items())

    def to_dict(self) -> dict[str, Any]:
        """For JSON, where numbers that are not finite are `None`."""
        numbers = {name: value if isfinite(value) else None for name, value in self.numbers.items()}
        return {**asdict(replace(self, numbers={})), "numbers": numbers, "page": self.page}


ADVICE: dict[str, tuple[str, ...]] = {  # by names of findings, and by the causes of `health.CAUSES`
    "failing": (
        "Read some completions (log_completions=True).",
        "Go back to an earlier checkpoint, and lower learning_rate.",
        "If completions/clipped_ratio has risen, raise max_completion_length.",
    ),
    "drifting": (
        "Watch it: healthy runs drift, too.",
        "If success falls as well, lower learning_rate, num_iterations or steps_per_generation.",
    ),
    "no_rise": (
        "Train longer, or sample more completions a step (generation_batch_size).",
        "Ask `ragen2-trl what-if` which setting would pay off (log_completions=True).",
    ),
    "too_early": ("Train longer (max_steps).",),
    "unrewarded": ("Let a reward function return a finite number for each completion.",),
    "unanswered": (
        "The model has to know the format before rewards can differ: {warm_start}, or an instruct model.",
        "If completions/clipped_ratio is high, answers are cut off: raise max_completion_length.",
    ),
    "cut": ("Raise max_completion_length.",),
    "unsolved": ("Take easier tasks, or fine-tune on solved ones first: {warm_start}.",),
    "solved": ("Take harder tasks: these have nothing to teach.",),
    "unselected": ("Check the settings that select groups: {selector}.",),
    "equal": (
        "If it is the lowest reward, read some completions (log_completions=True): does the reward find the answers?",
        "If it does, the tasks are too hard: take easier ones, or fine-tune on solved ones first ({warm_start}).",
        "If it is the highest reward, take harder tasks.",
    ),
    "alike": (
        "Prompts are solved always or never: take tasks between too hard and too easy.",
        "Raise num_generations, or sample at temperature=1.0 without top_p, top_k and min_p.",
    ),
    "dead_groups": ("Ask `ragen2-trl what-if` which setting would pay off.",),
    "no_outcome": ("Map the key of one: --key KEY=reward or --key KEY=success.",),
    "no_spread": ("TRL's GRPOTrainer logs both; elsewhere map a key: --key KEY=zero_variance.",),
    "no_validity": ("TrainingHealthCallback(trainer, valid=...) logs valid answers; or map a key: --key KEY=valid.",),
    "no_drift": ("Map the keys that hold them: --key KEY=entropy.",),
    "no_count": ("Give their number: --completions N; TrainingHealthCallback logs it.",),
    "averaged": ("Log each step (logging_steps=1) for an earlier and surer answer.",),
    "template_collapse": ("No reason to stop: on real runs success has gone on rising in this state.",),
    "low_entropy_collapse": ("No reason to stop: on real runs success has gone on rising in this state.",),
    "not_measured": ("Before training: trainer.add_callback(MutualInformationCallback(trainer)).",),
    "prompt_lost": ("Go back to an earlier checkpoint.",),
    "no_rows": ("Before training: a smaller logging_steps.",),
}


def make(
    kind: Kind, name: str, sentence: str, since: int | None = None, numbers: Mapping[str, float] | None = None
) -> Finding:
    """A finding with the severity and the advice that its name stands for."""
    return Finding(kind, name, SEVERITIES.get(name, "note"), sentence, since, numbers or {}, ADVICE.get(name, ()))


# Training


def training_finding(state: State) -> Finding:
    """What a state of `Health` says, with what to do about it.

    >>> training_finding(State("no_rise", 118, "In 60 rows mean reward is 0.5.")).sentence
    'Training: flat (no rise shown) since step 118. In 60 rows mean reward is 0.5.'
    """
    if state.name == "nothing_to_learn":
        return replace(flat_finding(state.sentence, state.what), since=state.since)
    return make("training", state.name, state.sentence, None if state.name == "too_early" else state.since)


def flat_finding(
    sentence: str, why: str, warm_start: str = "a warm start", selector: str = "selector or snr_strategy"
) -> Finding:
    """Of generations that teach nothing, with what to do about it.

    Args:
        sentence: What is said of them.
        why: From `why_flat`.
        warm_start: How the model learns the format first.
        selector: The settings that keep groups.
    """
    cause = next((name for name, text in CAUSES.items() if why.startswith(text)), "alike")
    advice = tuple(line.format(warm_start=warm_start, selector=selector) for line in ADVICE[cause])
    return replace(make("training", "nothing_to_learn", sentence), advice=advice)


def nothing_learnt() -> Finding:
    """A run in which no step had a group to train on."""
    said = "No step had a group to train on: the weights are those that the run began with."
    return make("training", "nothing_learnt", said)


# Reasoning


def reasoning_finding(
    judgements: Sequence[Judgement], step: int = 0, silence: str | None = None, answers_lost: bool = False
) -> Finding:
    """Whether reasoning depends on its prompt, after `step` optimizer steps of a run.

    Args:
        judgements: From `judge`, of the run so far.
        step: Optimizer steps done.
        silence: Why it was not measured when it last should have been; `None` where nothing measures it.
        answers_lost: Whether answers do not depend on their prompt, which takes the calm out of a collapse.

    >>> reasoning_finding([]).name
    'not_measured'
    """
    if not judgements:
        why = "" if silence is None else f": {silence or 'no step asked for it'}"
        found = make("reasoning", "not_measured", f"Whether reasoning depends on its prompt was not measured{why}.")
        return replace(found, advice=()) if why else found
    last = judgements[-1]
    name, said = _judged(judgements, step)
    unclosed = f" ({_unclosed(last.evidence)})" if last.evidence.valid_thinking_rate == 0 else ""
    found = make("reasoning", name, f"{said}{unclosed}.", last.since, _numbers(last))
    return replace(found, advice=()) if answers_lost else found


def _judged(judgements: Sequence[Judgement], step: int) -> tuple[str, str]:
    """The name of what the last measurement says, and its sentence without the full stop."""
    last = judgements[-1]
    evidence, regime = last.evidence, last.regime
    if last.is_collapsed:
        said = f"Reasoning has become {BECOME[regime]}: since step {last.since} it says little about its prompt"
        return regime, said
    if regime == "foreign":
        return regime, "The completions do not belong to these prompts, or not to this model"
    if regime == "inconclusive":
        count = f"{evidence.num_completions:.0f} reasoning traces"
        return regime, f"Cannot tell from {count} whether they depend on their prompts; {last.enough} would do"
    if regime == "independent":
        yet = " yet" if evidence.step is not None and not last.has_depended else ""
        beyond = f"retrieval beyond {upper_bound(evidence.hits, evidence.trials, ALPHA):.0%} is excluded"
        return regime, f"Dependence on the prompt is not shown{yet} (p = {evidence.p_value:.2g}); {beyond}"
    if regime == "weaker":
        before = "than before, which one measurement cannot tell from chance"
        return regime, f"Depends less on its prompt at step {evidence.step} {before}"
    subject = "What the model writes" if evidence.valid_thinking_rate == 0 else "Reasoning"
    if is_stale(judgements, step):
        return "stale", f"{subject} depended on its prompt when last measured, at step {evidence.step}"
    if (ended := next((one for one in reversed(judgements) if one.is_collapsed), None)) is not None:
        was = f"it was {BECOME[ended.regime]} from step {ended.since} to {ended.evidence.step}"
        return "recovered", f"Reasoning depends on its prompt again: {was}"
    return "dependent", f"{subject} depends on its prompt"


def _numbers(judgement: Judgement) -> dict[str, float]:
    evidence, best = judgement.evidence, judgement.best
    names = (*Evidence.METRICS, "valid_thinking_rate", "success", "clipped_ratio")
    known = {name: getattr(evidence, name) for name in names if getattr(evidence, name) is not None}
    known["p_value"] = evidence.p_value
    if judgement.is_collapsed and best is not None:
        known |= {"best_retrieval_accuracy": best.retrieval_accuracy, "retrieval_accuracy_at_most": judgement.upper}
    return known


def _unclosed(evidence: Evidence) -> str:
    """What was scored where no turn closes its reasoning: because there are no tags, or it was cut off before."""
    cut = evidence.clipped_ratio
    why = "" if cut is None or cut < CUT_RATIO else f", {cut:.0%} of completions cut at the length limit"
    return f"no closed think tag{why}: what was written was scored to its end"


# Answers


def answer_findings(measurements: Sequence[AnswerEvidence]) -> list[Finding]:
    """What the last measurement says, seen with those before it: first of the prompt, then of the reasoning.

    >>> for finding in answer_findings([AnswerEvidence(10, 0.93, 32, 0.06, 0.02)]):
    ...     print(finding.sentence)
    Answers depend on their prompt (win rate 0.93, chance 0.5).
    Answers hardly change with the reasoning: 0.06 of 1 bit if another prompt's reasoning takes its place.
    """
    if not measurements:
        return []
    return [found for found in (_of_prompt(measurements), _of_thought(measurements[-1])) if found]


def _of_prompt(measurements: Sequence[AnswerEvidence]) -> Finding | None:
    last = measurements[-1]
    if last.prompt_win_rate is None:
        if last.same_across is None or last.same_across < ALIKE:
            return None
        said = f"{last.same_across:.0%} of pairs of prompts get the same answer."
        return make("answers", "same_answers", said, numbers={"same_across": last.same_across})
    rate = f"win rate {last.prompt_win_rate:.2f}, chance 0.5"
    best = max(measurements[:-1], key=lambda one: one.lowest if one.uses_prompt else 0.0, default=None)
    if last.uses_prompt:
        still = " still" if best is not None and best.uses_prompt else ""
        name, said = "prompt_used", f"Answers{still} depend on their prompt ({rate})."
    elif best is not None and best.uses_prompt and last.highest < best.lowest:
        was = f"at step {best.step}: {best.prompt_win_rate:.2f}"
        name, said = "prompt_lost", f"Answers no longer depend on their prompt ({rate}; {was})."
    else:
        name, said = (
            "prompt_not_shown",
            f"Dependence of answers on their prompt is not shown: a win rate of {last.prompt_win_rate:.2f} over "
            f"{last.num_compared:.0f} answers may be chance (p = {last.p_value:.2g}, above {ALPHA:g}); the true "
            f"rate is at most {last.highest:.2f}.",
        )
    numbers = {"prompt_win_rate": last.prompt_win_rate, "num_compared": last.num_compared, "p_value": last.p_value}
    return make("answers", name, said, last.step if name == "prompt_lost" else None, numbers)


def _of_thought(last: AnswerEvidence) -> Finding | None:
    bits, margin = last.thought_swap_bits, 2 * last.thought_swap_standard_error
    if bits is None:
        return None
    swapped = "if another prompt's reasoning takes its place."
    if bits + margin < -LITTLE:  # of a model's own answers the mean is not below 0
        name, said = "foreign_answers", f"Answers are unlikely under this model ({bits:.2f} bits): did it write them?"
        said += " Not judged."
    elif bits + margin < LITTLE:
        name, said = (
            "reasoning_hardly_used",
            f"Answers hardly change with the reasoning: {bits:.2f} of 1 bit {swapped}",
        )
    elif bits - margin > MUCH:
        name, said = "reasoning_used", f"Answers change with the reasoning: {bits:.2f} of 1 bit {swapped}"
    else:
        name = "reasoning_partly_used"
        said = f"Answers change in part with the reasoning: {bits:.2f} of 1 bit (± {margin:.2f}) {swapped}"
    numbers = {"thought_swap_bits": bits, "thought_swap_standard_error": last.thought_swap_standard_error}
    return make("answers", name, said, numbers=numbers)


# Data


def gap_findings(watch: Health, rows: Sequence[Mapping[str, Any]], knows_completions: bool = False) -> list[Finding]:
    """What a log lacks for the judgement of `watch`, what is assumed in its place, and the setting that logs it.

    Args:
        watch: After all rows.
        rows: Of the log.
        knows_completions: Whether someone said how many completions a row is about.

    >>> [found.name for found in gap_findings(Health(), [{"step": 1, "reward": 0.5, "frac_reward_zero_std": 0.1}])]
    ['no_validity', 'no_drift']
    """
    found = [{watch.name_of(key): value for key, value in row.items() if is_number(value)} for row in rows]
    names, said = {name for row in found for name in row}, dict[str, str]()
    outcomes = [name for name in ("success", "reward") if name in names]
    if not outcomes:
        said["no_outcome"] = "No row has a reward or success: learning cannot be judged."
    if not names & {"zero_variance", "reward_std", "kept"}:
        said["no_spread"] = "No row has frac_reward_zero_std or reward_std: groups of equal rewards do not show."
    if not (is_valid := names & {"valid", "valid_thinking"}):
        by = " and ".join(outcomes) or "held-out success"
        said["no_validity"] = f"No row has valid answers or closed reasoning: only {by} can show failing, late."
    if lacking := [one.what for name, one in SIGNALS.items() if one.state == "drifting" and name not in names]:
        said["no_drift"] = f"No row has {', '.join(lacking)}: drifting is judged without these."
    if is_valid and not knows_completions and not any(COUNT in row for row in rows):
        said["no_count"] = f"No row says how many completions it is about: {watch.completions} are assumed."
    if all(row.get("step") is None for row in rows):
        said["no_steps"] = "The log has no steps: each row counts as one generation."
    elif watch.weight > 1:
        how = "one a step (TRL's default; too many if steps reuse a generation)"
        if any(GENERATION in row for row in rows):
            how = f"by their number ({GENERATION})"
        elif watch.steps_per_generation is not None:
            how = f"one in {float(watch.steps_per_generation):g} steps"
        said["averaged"] = f"A row averages several steps and counts as {watch.weight:.3g} generations, {how}."
    dead = [row["zero_variance"] for row in found if "zero_variance" in row][-LATEST:]
    if dead and (share := sum(dead) / len(dead)) >= DEAD and watch.state.name != "nothing_to_learn":
        said["dead_groups"] = f"{share:.0%} of groups had equal rewards in the last {counted(len(dead), 'row')}."
    return [replace(make("data", name, sentence), severity="note") for name, sentence in said.items()]


def log_findings(rows: Sequence[Mapping[str, Any]], trained: int, problems: Iterable[str] = ()) -> list[Finding]:
    """What a log and the files beside it lack.

    Args:
        rows: All log rows of a run.
        trained: How many of them are about training steps.
        problems: What could not be read; sentences.
    """
    said = [("unreadable", problem) for problem in problems]
    if not trained:
        why = "the run ended before its first log, or logs less often than it had steps"
        said.append(("no_rows", f"No training step was logged: {why}."))
    count = counted(len(rows), "log row")
    if stepless := sum(row.get("step") is None for row in rows):
        said.append(("no_steps", f"No step in {stepless} of {count}, which figures leave out."))
    broken = [(row.get("step"), names) for row in rows if (names := _not_finite(row))]
    if broken:
        where = f"in {len(broken)} of {count}, the first at step {broken[0][0]}: {', '.join(broken[0][1])}"
        said.append(("not_finite", f"Values that are not finite numbers {where}. Figures leave them out."))
    return [make("data", name, sentence) for name, sentence in said]


def _not_finite(row: Mapping[str, Any]) -> list[str]:
    return [key for key, value in row.items() if isinstance(value, float) and not isfinite(value)]
