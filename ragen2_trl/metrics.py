"""Every logged metric once: its unit, its meaning, its label, and whether trackers and the console get it.

`docs/metrics.md` has its tables from here (`python scripts/make_metrics_page.py`); figures, model card, report and
summary take labels and units from here, health its signals. Names are patterns: `{k}` stands for what `PLACES` allows.

    >>> metric("mi/first_turn/retrieval_accuracy@4").name
    'mi/{scope}/retrieval_accuracy@{k}'
    >>> metric("snr/kept_fractoin") is None
    True
"""

import re
from dataclasses import dataclass
from functools import cache

# What a place in a name stands for. The first scope that was measured is shown.
SCOPES = ("first_turn", "trajectory")
PLACES = {
    "scope": rf"{SCOPES[0]}|{SCOPES[1]}(?:/turn_\d+|/without_own_words)?",
    "bucket": r"bucket_\d+|all",
    "part": "[^/]+",
    "task": "[^/]+",
    "k": r"\d+",
    "form": "seq|token|token_tempered",
    "bound": "|_ci_low|_ci_high",
    "side": "low|high",
    "extreme": "mean|min|max",
}

# Keys that other modules read.
FIRST_TURN = "mi/first_turn"  # the scope that verdicts rest on
ACCURACY, CHANCE = f"{FIRST_TURN}/retrieval_accuracy", f"{FIRST_TURN}/retrieval_chance"
INFORMATION, BOUND = f"{FIRST_TURN}/mi_seq", f"{FIRST_TURN}/mi_upper_bound"
CONDITIONAL_ENTROPY = f"{FIRST_TURN}/conditional_entropy_token"
MARGINAL_ENTROPY = f"{FIRST_TURN}/marginal_entropy_token"
ANSWER = "mi/answer"
ANSWER_PROMPT, ANSWER_THOUGHT = f"{ANSWER}/prompt_win_rate", f"{ANSWER}/thought_swap_bits"
VALID_THINKING = "mi/valid_thinking_rate"
KEPT, COMPUTE, EMPTY_STEPS = "snr/kept_fraction", "snr/update_compute_fraction", "snr/empty_steps"
ZERO_VARIANCE = "snr/zero_variance_fraction"
GENERATION = "snr/generation"
PREDICTED, REALISED = "snr/predicted_variance", "snr/realised_variance"
CORRELATION, SKIPPED = "snr/prediction_rank_correlation", "snr/skipped_prompts"
REWARD, ENTROPY, CLIPPED = "reward", "entropy", "completions/clipped_ratio"
STEP_OF_MI = "mi/step"


@dataclass(frozen=True)
class Metric:
    """One logged key, or several that a pattern covers.

    Args:
        name: The key; `{...}` for a place in `PLACES`.
        unit: `fraction`, `nats`, `tokens`, `count`, ...; it decides how `text` writes a value.
        meaning: In one sentence of Markdown, limits included.
        label: A short name for tables and figures.
        shown: Whether trackers and the console get it by default.
        health: The signal of `instrument.health` that it is watched as.
    """

    name: str
    unit: str
    meaning: str
    label: str = ""
    shown: bool = False
    health: str = ""

    def text(self, value: float) -> str:
        """A value as tables write it."""
        return in_unit(value, self.unit)


def in_unit(value: float, unit: str) -> str:
    """A number as tables write it.

    >>> in_unit(0.5, "fraction"), in_unit(-0.001, "nats"), in_unit(1200.0, "count"), in_unit(0.5, "reward")
    ('50.0%', '0.00', '1,200', '0.500')
    """
    if unit == "fraction":
        return f"{value:.1%}"
    if unit == "count":
        return f"{value:,.0f}"
    return f"{round(value, 2) + 0.0:.2f}" if unit.startswith(("nats", "times")) else f"{value:.3f}"


# fmt: off
MI = (
    Metric("mi/{scope}/retrieval_accuracy", "fraction",
           "how often a reasoning trace is most likely under its own prompt; in real runs it fell while success rose",
           "retrieval accuracy", shown=True),
    Metric("mi/{scope}/retrieval_chance", "fraction", "retrieval accuracy of guessing", "chance", shown=True),
    Metric("mi/{scope}/mi_seq", "nats",
           "mutual information of trace and prompt; 0 without any, or below 0 by chance", "I(X;Z)", shown=True),
    Metric("mi/{scope}/mi_upper_bound", "nats", "the most it can be: log N for N prompts", "at most", shown=True),
    Metric("mi/{scope}/retrieval_accuracy@{k}", "fraction",
           "how often its own prompt is among the k likeliest (2, 4, 8); shows a drift first if prompts come in "
           "kinds"),
    Metric("mi/{scope}/retrieval_chance@{k}", "fraction", "the same for guessing"),
    Metric("mi/{scope}/mi_token", "nats per token",
           "`mi_seq` per token, the paper's form; also falls when reasoning gets longer"),
    Metric("mi/{scope}/mi_token_tempered", "",
           "the reference code's form, to compare with published curves; has no bound"),
    Metric("mi/{scope}/conditional_entropy_token", "nats per token",
           "how much reasoning varies for the same prompt", "H(Z|X)"),
    Metric("mi/{scope}/conditional_entropy_seq", "nats", "the same per trace"),
    Metric("mi/{scope}/marginal_entropy_token", "nats per token",
           "how much reasoning varies over all prompts", "H(Z)"),
    Metric("mi/{scope}/marginal_entropy_seq", "nats", "the same per trace"),
    Metric("mi/{scope}/mi_zscore_{form}", "",
           "`mi_<form>` over `marginal_std_<form>` (paper, Table 1); meaningless near a deviation of 0"),
    Metric("mi/{scope}/mi_zscore_ema_{form}", "", "the same over the running mean of the deviation"),
    Metric("mi/{scope}/marginal_std_{form}", "nats, or per token", "standard deviation of the marginal"),
    Metric("mi/{scope}/num_prompts", "count", "distinct prompts"),
    Metric("mi/{scope}/num_completions", "count", "reasoning traces"),
    Metric("mi/regime/conclusive", "0 or 1", "1 if there is a [verdict](diagnosing.md)"),
    Metric("mi/regime/depends_on_prompt", "0 or 1", "1 if reasoning depends on its prompt"),
    Metric("mi/regime/low_entropy", "0 or 1", "1 if entropy is low"),
    Metric("mi/regime/collapsed", "0 or 1", "1 if reasoning has stopped depending on its prompt: act"),
    Metric(VALID_THINKING, "fraction",
           "turns whose reasoning ends with `</think>`: act when `health` calls it failing; 0 for a model without "
           "tags, whose whole text counts as reasoning", "closed reasoning", shown=True, health="valid_thinking"),
    Metric("mi/completions_without_reasoning", "count", "completions with nothing to score: act above a few"),
    Metric("mi/groups/identical_completions", "fraction", "first groups of identical completions: act when it rises"),
    Metric("mi/groups/equal_rewards", "fraction",
           "first groups of different completions with equal rewards; if high, the reward is too coarse, or prompts "
           "are too easy or too hard"),
    Metric("mi/groups/zero_variance", "fraction", "first groups without reward variance"),
    Metric(ANSWER_PROMPT, "fraction",
           "how often an answer is likelier after its own prompt and another sample's reasoning than after another "
           "prompt and its reasoning; chance is 0.5", "answers: prompt win rate"),
    Metric(ANSWER_THOUGHT, "bits",
           "loss of an answer after the reasoning of another prompt (0: none, 1: the answer is impossible); a high "
           "value does not prove that the answer [rests on the reasoning](diagnosing.md#answers)",
           "answers: thought swap"),
    Metric("mi/answer/thought_swap_standard_error", "bits", "its standard error over answers"),
    Metric("mi/answer/thought_swap_in_group_bits", "bits",
           "the same loss with another sample's reasoning of the same prompt; no information if samples of a prompt "
           "reason alike"),
    Metric("mi/answer/prompt_swap_bits", "bits", "the same loss with another prompt and its own reasoning"),
    Metric("mi/answer/same_in_group", "fraction", "answers shared with another sample of the prompt"),
    Metric("mi/answer/same_across", "fraction", "pairs of different prompts with the same answer: act near 1"),
    Metric("mi/answer/num_swaps", "count", "answers behind `thought_swap_bits`"),
    Metric("mi/answer/num_compared", "count", "answers behind `prompt_win_rate`"),
    Metric("mi/answer/without_answer", "fraction", "turns without an answer: they were cut off, or need `answer=`"),
    Metric(STEP_OF_MI, "step", "first optimizer step that trains on the completions measured"),
    Metric("mi/pooled_steps", "steps",
           "age of the oldest completions, if generations of fewer than `min_prompts` (8) groups are pooled"),
    Metric("mi/seconds", "seconds", "time of a measurement"),
    Metric("mi/tokens", "tokens", "tokens scored"),
)

SNR = (
    Metric(GENERATION, "count",
           "number of the newest generation behind the row's `snr/*`, also in the column `generation` of saved "
           "completions"),
    Metric("snr/kept_groups", "count", "groups with a kept completion"),
    Metric(KEPT, "fraction",
           "completions kept; not `snr_value`, the share of reward variance: few groups often hold 0.9 of it",
           "completions kept", shown=True, health="kept"),
    Metric("snr/kept_tokens_fraction", "fraction", "completion tokens kept"),
    Metric(COMPUTE, "fraction",
           "positions of one pass over a generation, with padding, old and reference log-probs, over plain TRL's; "
           "without generation and PPO's old values", "update compute", shown=True),
    Metric(EMPTY_STEPS, "count", "optimizer steps of the run without a kept group", "steps without a kept group",
           shown=True),
    Metric(ZERO_VARIANCE, "fraction",
           "groups without reward variance; the next three tell too easy from too hard",
           "groups without reward variance", health="zero_variance"),
    Metric("snr/dropped_all_best", "fraction",
           "dropped groups with only the best reward: the task's, or else the best so far"),
    Metric("snr/dropped_all_worst", "fraction", "dropped groups with only the worst reward"),
    Metric("snr/dropped_all_same", "fraction", "dropped groups of equal rewards, not known to be best or worst"),
    Metric("snr/in_group_max", "reward", "best reward of a group, mean over groups"),
    Metric("snr/in_group_mean", "reward", "mean reward of a group"),
    Metric("snr/score_mean", "score", "mean of the ranking score, by default reward variance"),
    Metric("snr/score_max", "score", "its maximum"),
    Metric("snr/reward_std_spread", "ratio",
           "standard deviation over mean of the ranked groups' reward standard deviations (paper, Table 8); as a "
           "sign that the filter helps [inconclusive here](../research/results/tab8.md)"),
    Metric("snr/reward_variance_spread", "ratio", "the same of their variances"),
    Metric("snr/sampling_rounds", "count", "rounds of sampling"),
    Metric("snr/prompts_used", "count", "prompts sampled"),
    Metric("snr/trained_groups", "count", "groups in the final batch"),
    Metric("snr/waiting_groups", "count", "surplus groups carried to the next step"),
    Metric("snr/carried_groups", "count", "surplus groups taken from the last step"),
    Metric("snr/stale_groups", "count", "surplus groups discarded as too old"),
    Metric("snr/sampled_completions", "count", "completions sampled"),
    Metric("snr/sampled_fraction", "fraction", "the same as a share of whole groups for all prompts"),
    Metric("snr/committed_fraction", "fraction", "prompts sampled whole, without audited ones"),
    Metric("snr/pilot_reward", "reward", "mean reward of all pilots; `reward` has more of prompts sampled whole"),
    Metric("snr/missed_variance", "fraction",
           "estimated share of reward variance in prompts not sampled whole, from the 2 % of them that are audited "
           "([how](mathematics.md#pilots))"),
    Metric("snr/sampled_staleness", "count",
           "asynchronous trainer: weight versions by which the trainer is ahead when a group arrives"),
    Metric(PREDICTED, "reward squared",
           "with `snr_prompt_selection`: mean predicted reward variance of the first prompts"),
    Metric(REALISED, "reward squared", "mean reward variance of their groups: act when it differs for long"),
    Metric(CORRELATION, "correlation",
           "Spearman's correlation of the two over the latest 256 groups: about 0 in the first epoch"),
    Metric(SKIPPED, "count", "candidates passed over for the first prompts"),
    Metric("snr/oldest_unseen", "count", "prompts sampled since the least recently sampled prompt"),
)

PPO = (
    Metric("ppo/value_loss", "reward squared",
           "mean of half the squared error of values, clipped, before `value_coef`"),
    Metric("ppo/explained_variance", "fraction",
           "share of the variance of returns that the critic predicts before the update; below 0 is worse than their "
           "mean, mostly noise if that variance is small"),
    Metric("ppo/return_mean", "reward", "mean return from a token on"),
)

ENV = (
    Metric("env/{task}/success", "fraction",
           "episodes that solve the task; with several tasks, `all` has all episodes", "success in training",
           health="success"),
    Metric("env/{task}/return", "reward", "mean return, the reward of an episode"),
    Metric("env/{task}/pass@{k}", "fraction",
           "prompts with at least one solved among their k completions: far above `success`, there is much to learn; "
           "not logged with pilots"),
    Metric("env/{task}/turns", "turns", "mean turns of an episode"),
    Metric("env/{task}/valid_rate", "fraction", "turns in the required format", health="valid"),
    Metric("env/{task}/failed", "fraction",
           "episodes that a lost connection or a time-out ended, left out of the other means; above a twentieth of a "
           "generation the run ends"),
    Metric("env/{task}/num_actions", "count", "mean actions carried out in an episode"),
    Metric("env/{task}/action_is_valid", "fraction",
           "share of an episode's turns with an action carried out (`valid_rate`: over turns)", health="valid"),
    Metric("env/{task}/action_is_effective", "fraction",
           "share of an episode's turns whose last action changed the state or ended the episode"),
)

HEALTH = (
    Metric("health/completions", "count", "completions behind the shares of this row, first groups alone"),
    Metric("health/valid_rate", "fraction",
           "turns with closed reasoning in first groups, or completions accepted by `valid=`; not logged beside "
           "`env/*/valid_rate`", health="valid"),
)

EVAL = (
    Metric("eval/env/{task}/success{bound}", "fraction", "episodes that solve the task", "held-out success",
           health="held_out_success"),
    Metric("eval/env/{task}/random_success", "fraction", "success of the random baseline on the same tasks"),
    Metric("eval/env/{task}/return{bound}", "reward", "mean return"),
    Metric("eval/env/{task}/pass@{k}{bound}", "fraction",
           "chance that one of k samples solves a task, for k = 1, 2, 4, …"),
    Metric("eval/env/{task}/valid_rate{bound}", "fraction", "turns in the required format, mean over episodes"),
    Metric("eval/env/{task}/turns{bound}", "turns", "mean turns of an episode"),
    Metric("eval/env/{task}/completion_length{bound}", "tokens", "mean tokens that the model wrote in an episode"),
    Metric("eval/env/{task}/failed", "fraction", "episodes left out after a lost connection or a time-out"),
    Metric("eval/env/{task}/num_prompts", "count", "held-out tasks"),
    Metric("eval/env/{task}/num_samples", "count", "episodes of each"),
    Metric("eval/seconds", "seconds", "time of evaluating, all tasks together"),
)

COST = (
    Metric("cost/seconds", "seconds",
           "wall clock of sampling, rewards and updates, without evaluations, checkpoints, logging and measurements"),
    Metric("cost/cpu_seconds", "seconds",
           "CPU time of the same, fairer on a busy machine, without GPUs and programs in the sandbox"),
    Metric("cost/sampled_tokens", "tokens",
           "tokens sampled in training, of dropped groups too, without those of prompts"),
    Metric("cost/sampled_completions", "count", "completions sampled in training, of dropped groups too"),
    Metric("cost/plain_completions", "count", "completions of plain TRL for as many generations"),
    Metric("cost/update_rows", "count", "rows that updates trained on, once for each generation"),
    Metric("cost/update_positions", "tokens",
           "positions of all passes over a generation, as in `snr/update_compute_fraction`"),
    Metric("cost/plain_update_positions", "tokens", "the same of plain TRL"),
    Metric("cost/update_tokens", "tokens", "positions forward and backward, with padding and a separate critic's"),
    Metric("cost/update_flops", "operations",
           "6 x parameters x those positions, without the quadratic part of attention, gradient checkpointing and "
           "sampling"),
)

TRL = (
    Metric(REWARD, "reward", "mean of all rewards", "reward in training", health="reward"),
    Metric("reward_std", "reward",
           "standard deviation of all rewards of a generation; groups need not vary", health="reward_std"),
    Metric("frac_reward_zero_std", "fraction",
           "groups without reward variance as TRL counts them: rounding and RLOO's KL penalty hide such groups, and "
           "with `scale_rewards=\"batch\"` it is about the whole batch", health="zero_variance"),
    Metric(ENTROPY, "nats per token",
           "mean entropy of the next token, which says nothing about the prompt", "policy entropy", health="entropy"),
    Metric("clip_ratio/region_mean", "fraction",
           "tokens whose update was clipped: 0 with one optimizer step per generation, unless groups are carried "
           "over", health="clip_ratio"),
    Metric("clip_ratio/{side}_{extreme}", "fraction",
           "the same from below and from above: mean, lowest and highest of the processes"),
    Metric("completions/mean_length", "tokens", "tokens of a completion", health="length"),
    Metric(CLIPPED, "fraction", "completions cut off at `max_completion_length`", health="clipped"),
    Metric("kl", "nats per token", "distance to the reference model, with `beta` above 0"),
    Metric("loss", "", "the loss; GRPO's is near 0 by construction"),
    Metric("grad_norm", "norm", "gradient norm of the row's latest step with trained rows", health="grad_norm"),
)
# fmt: on

FAMILIES = {
    "mi": MI,
    "snr": SNR,
    "ppo": PPO,
    "env": ENV,
    "health": HEALTH,
    "eval": EVAL,
    "cost": COST,
    "trl": TRL,
}
METRICS = tuple(one for family in FAMILIES.values() for one in family)


@cache
def metric(name: str) -> Metric | None:
    """The metric of a logged key, in training or with TRL's `eval_` before it; `None` for a key that is none."""
    for one, pattern in _patterns():
        if pattern.fullmatch(name) or pattern.fullmatch(name.removeprefix("eval_")):
            return one
    return None


def label(name: str) -> str:
    """What a logged key is called in tables and figures.

    >>> label("snr/kept_fraction"), label("env/sokoban/success"), label("rewards/solved/mean")
    ('completions kept', 'success in training', 'rewards/solved/mean')
    """
    one = metric(name)
    return name if one is None or not one.label else one.label


@cache
def _patterns() -> tuple[tuple[Metric, re.Pattern[str]], ...]:
    """Each metric with an expression of its names."""

    def expression(name: str) -> str:
        parts = re.split(r"\{(\w+)\}", name)  # text and places in turn
        return "".join(f"(?:{PLACES[part]})" if i % 2 else re.escape(part) for i, part in enumerate(parts))

    return tuple((one, re.compile(expression(one.name))) for one in METRICS)
