"""A verdict in words: what log, warning, card, report and `diagnose` say, all of them the same."""

from collections.abc import Sequence

from ragen2_trl.instrument.verdict import Collapse, Evidence, Finding, collapses, is_stale, mood

# Of reasoning, in a list of measurements.
REGIMES = {
    "diverse": "Diverse: depends on its prompt and varies between samples",
    "compressed": "Compressed: depends on its prompt and hardly varies between samples",
    "template_collapse": "Template collapse: varies between samples, and no longer depends on its prompt",
    "low_entropy_collapse": "Low-entropy collapse: hardly varies, and no longer depends on its prompt",
    "weaker": "Depends less on its prompt than before, which one measurement cannot tell from chance",
    "independent": "Does not depend on its prompt",
    "undecided": "Too few reasonings to tell",
    "foreign": "Does not belong to these prompts, or not to this model",
}
COLLAPSED = {
    "template_collapse": "Template collapse",
    "low_entropy_collapse": "Low-entropy collapse",
    "format_collapse": "Format collapse",
}
CUT_RATIO = 0.5  # share of completions cut at the length limit, from which that is said to be why nothing is closed


def headline(findings: Sequence[Finding], step: int = 0) -> str:
    """In a few words, whether reasoning depends on its prompt, after `step` optimizer steps of a run.

    >>> headline([])
    'Not measured'
    """
    if not findings:
        return "Not measured"
    last, found, how = findings[-1], collapses(findings), mood(findings, step)
    latest = found[-1] if found else None
    if how == "collapsed" and latest is not None:
        words = f"{COLLAPSED[latest.regime]} since step {latest.first}"
    elif how == "open":
        words = _open(last)
    elif how == "suspect":
        words = _suspect(last, is_stale(findings, step))
    elif how == "recovered" and latest is not None:
        words = f"Recovered: {COLLAPSED[latest.regime].lower()} from step {latest.first} to {latest.last}"
    else:
        words = f"{_subject(last.evidence)} depends on its prompt"
    return words if last.evidence.valid_thinking_rate != 0 else f"{words} ({_unclosed(last.evidence)})"


def beside(evidence: Evidence) -> str:
    """What qualifies a verdict, as far as it is known: valid thinking, success, and what was cut at the limit."""
    parts = []
    if evidence.valid_thinking_rate is not None:
        parts.append(f"valid thinking {evidence.valid_thinking_rate:.0%}")
    if evidence.success is not None:
        parts.append(f"success {evidence.success:.0%}")
    if evidence.clipped_ratio is not None:
        parts.append(f"{evidence.clipped_ratio:.0%} of completions cut at the length limit")
    return ", ".join(parts)


def in_numbers(finding: Finding) -> str:
    """The numbers behind a verdict, in sentences."""
    evidence, best, start = finding.evidence, finding.best, finding.start
    sentences = [
        f"The own prompt explains {evidence.retrieval_accuracy:.1%} of {evidence.num_completions:.0f} reasonings best "
        f"(guessing: {evidence.retrieval_chance:.1%}"
    ]
    if finding.is_collapsed and best is not None:
        sentences[0] += (
            f"; at step {best.step}: {best.retrieval_accuracy:.1%}), and since step {finding.since} surely at most "
            f"{finding.upper:.1%} (99 % confidence)"
        )
    else:
        sentences[0] += f", p = {evidence.p_value:.2g})"
    was = f" ({start.conditional_entropy_token:.2f} at step {start.step})" if start is not evidence else ""
    sentences.append(
        f"Mutual information is {evidence.mi_seq:.2f} of at most {evidence.mi_upper_bound:.2f} nats, entropy "
        f"{evidence.conditional_entropy_token:.2f} nats per token{was}"
    )
    if qualified := beside(evidence):
        sentences.append(qualified[:1].upper() + qualified[1:])
    return "".join(f"{sentence}. " for sentence in sentences).strip()


def warnings(findings: Sequence[Finding]) -> dict[str, str]:
    """What to warn of after the last measurement, by its regime: a state that begins with it, and says no good.

    Of a low-entropy collapse nothing is said: entropy shows it, too.
    """
    last, before = findings[-1], findings[-2] if len(findings) > 1 else None
    place = f"Step {last.evidence.step}: "
    texts: dict[str, str] = {}
    if last.regime == "foreign" and (before is None or before.regime != "foreign"):
        texts["foreign"] = f"{place}{headline(findings)}. {in_numbers(last)}"
    # Of one collapse, entropy may cross its bound again and again.
    told = any(one.since == last.since and one.regime == last.regime for one in findings[:-1])
    if last.regime == "template_collapse" and not told:
        texts["template_collapse"] = f"{place}{_since('template_collapse', last.since)}. {in_numbers(last)}"
    if last.format_since is not None and (before is None or before.format_since is None):
        valid, was = last.evidence.valid_thinking_rate, last.start.valid_thinking_rate
        texts["format_collapse"] = (
            f"{place}{_since('format_collapse', last.format_since)}. {valid:.0%} of turns hold reasoning that a tag "
            f"closes, {was:.0%} at step {last.start.step}."
        )
    return texts


def collapse_words(collapse: Collapse) -> str:
    """What a collapse is called beside a curve."""
    return COLLAPSED[collapse.regime].lower()


def _since(regime: str, step: int | None) -> str:
    return f"{COLLAPSED[regime]} since step {step}"


def _subject(evidence: Evidence) -> str:
    return "What the model writes" if evidence.valid_thinking_rate == 0 else "Reasoning"


def _unclosed(evidence: Evidence) -> str:
    """What was scored where no turn closes its reasoning: for want of tags, or because it was cut off before."""
    cut = evidence.clipped_ratio
    why = "" if cut is None or cut < CUT_RATIO else f", {cut:.0%} of completions cut at the length limit"
    return f"no closed `<think>`{why}: what was written was scored to its end"


def _open(finding: Finding) -> str:
    evidence = finding.evidence
    if finding.regime == "foreign":
        return "The completions do not belong to these prompts, or not to this model"
    if finding.regime == "undecided":
        return (
            f"Cannot tell from {evidence.num_completions:.0f} reasonings whether they depend on their prompts; "
            f"{finding.enough} would do"
        )
    yet = " yet" if evidence.step is not None and not finding.has_depended else ""
    return f"{_subject(evidence)} does not depend on its prompt{yet}"


def _suspect(finding: Finding, stale: bool) -> str:
    step = finding.evidence.step
    if finding.regime == "weaker":
        return f"Depends less on its prompt at step {step} than before, which one measurement cannot tell from chance"
    if stale:
        return f"{_subject(finding.evidence)} depended on its prompt when last measured, at step {step}"
    raise ValueError(f"finding must be weaker or stale, got {finding.regime!r}")
