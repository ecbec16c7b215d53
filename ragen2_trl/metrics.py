"""Every logged metric once: its meaning, its unit, the data behind it, and whether it is shown by default.

`docs/metrics.md` has its tables from here (`python scripts/make_metrics_page.py`); figures, model card, report and
summary take labels and units from here. Names are patterns: `{k}` stands for what `PLACES` allows.

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
    "scope": "|".join(SCOPES),
    "turn": r"turn_\d+",
    "bucket": r"bucket_\d+|all",
    "part": "[^/]+",
    "task": "[^/]+",
    "k": r"\d+",
    "form": "seq|token|token_tempered",
    "bound": "|_ci_low|_ci_high",
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

# The data that a metric is computed from.
GROUPS = "groups"  # of the step, further rounds included
COMPLETIONS = "completions"  # of the step, further rounds included
FIRST = "first groups"  # of the step: without further rounds
RANKED = "ranked groups"
SAMPLE = "traces"  # `num_completions` of them
ANSWERS = "answers"  # 16 to 64
MEASUREMENTS = "measurements"  # so far
LOSS = "loss rows"
PASS = "one pass"  # over a generation
STEP = "step"
RUN = "run"  # so far
EPISODES = "episodes"  # of the step, further rounds included
HELD_OUT = "held out"  # episodes
GRADIENT_SAMPLE = "sampled groups"  # of each bucket


@dataclass(frozen=True)
class Metric:
    """One logged key, or several that a pattern covers.

    Args:
        name: The key; `{...}` for a place in `PLACES`.
        says: What the number is; empty if the metric shares the row above it.
        unit: `fraction`, `nats`, `tokens`, `count`, ...; it decides how `text` writes a value.
        rows: The rows, groups or steps that it is computed from.
        mind: Its limits, or when to act.
        label: A short name for tables and figures; by default the last part of the key in words.
        shown: Whether trackers and the console get it by default.
        health: The signal of `instrument.health` that it is watched as.
    """

    name: str
    says: str
    unit: str
    rows: str
    mind: str = ""
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


MI = (
    Metric(
        "mi/{scope}/retrieval_accuracy",
        "how often a reasoning trace is most likely under its own prompt",
        "fraction",
        SAMPLE,
        "no sign of [failing training](diagnosing.md#is-training-working): in real runs it fell while success rose",
        label="retrieval accuracy",
        shown=True,
    ),
    Metric("mi/{scope}/retrieval_chance", "the accuracy of guessing", "fraction", SAMPLE, "", "chance", shown=True),
    Metric(
        "mi/{scope}/mi_seq",
        "mutual information of trace and prompt (without any 0, or below 0 by chance), and its upper bound",
        "nats",
        SAMPLE,
        "the bound is log N for N prompts",
        label="I(X;Z)",
        shown=True,
    ),
    Metric("mi/{scope}/mi_upper_bound", "", "nats", SAMPLE, "", "at most", shown=True),
    Metric(
        "mi/{scope}/retrieval_accuracy@{k}",
        "how often its own prompt is among the k most likely (2, 4, 8), and the same for guessing",
        "fraction",
        SAMPLE,
        "shows a drift first if prompts come in kinds; says little with few prompts",
    ),
    Metric("mi/{scope}/retrieval_chance@{k}", "", "fraction", SAMPLE),
    Metric(
        "mi/{scope}/mi_token",
        "`mi_seq` per token, the paper's form",
        "nats per token",
        SAMPLE,
        "also falls when reasoning only gets longer",
    ),
    Metric(
        "mi/{scope}/mi_token_tempered",
        "mutual information as the reference code logs it, for comparison with published curves",
        "",
        SAMPLE,
        "not true mutual information: it has no bound",
    ),
    Metric(
        "mi/{scope}/conditional_entropy_token",
        "how much reasoning varies for the same prompt, per token and per trace",
        "nats per token",
        SAMPLE,
        "the variation may have nothing to do with the prompt",
        label="H(Z|X)",
    ),
    Metric("mi/{scope}/conditional_entropy_seq", "", "nats", SAMPLE),
    Metric(
        "mi/{scope}/marginal_entropy_token",
        "how much reasoning varies over all prompts, per token and per trace",
        "nats per token",
        SAMPLE,
        "the sum of conditional entropy and MI",
        label="H(Z)",
    ),
    Metric("mi/{scope}/marginal_entropy_seq", "", "nats", SAMPLE),
    *(
        Metric(
            f"mi/{{scope}}/{name}_{{form}}",
            says,
            "",
            SAMPLE,
            "meaningless near a deviation of 0",
        )
        for name, says in (
            ("mi_zscore", "`mi_<form>` over `marginal_std_<form>`, or over its running mean (paper, Table 1)"),
            ("mi_zscore_ema", ""),
        )
    ),
    Metric("mi/{scope}/marginal_std_{form}", "standard deviation of the marginal", "nats, or per token", SAMPLE),
    Metric("mi/{scope}/num_prompts", "distinct prompts and reasoning traces", "count", SAMPLE),
    Metric("mi/{scope}/num_completions", "", "count", SAMPLE),
    Metric(
        "mi/regime/conclusive",
        "1 if there is a [verdict](diagnosing.md#verdicts), if reasoning depends on its prompt, if entropy is low",
        "0 or 1",
        MEASUREMENTS,
    ),
    Metric("mi/regime/depends_on_prompt", "", "0 or 1", MEASUREMENTS),
    Metric("mi/regime/low_entropy", "", "0 or 1", MEASUREMENTS),
    Metric(
        "mi/regime/collapsed",
        "1 if reasoning has stopped depending on its prompt",
        "0 or 1",
        MEASUREMENTS,
        "act at 1; each collapse is warned of once, unless entropy is low",
    ),
    Metric(
        VALID_THINKING,
        "closed reasoning: share of turns whose reasoning ends with `</think>`",
        "fraction",
        SAMPLE,
        "act when `health` calls it failing; a model without tags has 0, and all its text counts as reasoning",
        label="closed reasoning",
        shown=True,
        health="valid_thinking",
    ),
    Metric(
        "mi/completions_without_reasoning",
        "completions with nothing to score",
        "count",
        SAMPLE,
        "act above a few",
    ),
    Metric(
        "mi/groups/identical_completions",
        "groups of identical completions",
        "fraction",
        FIRST,
        "act when it rises: the policy has become deterministic",
    ),
    Metric(
        "mi/groups/equal_rewards",
        "groups of different completions with equal rewards",
        "fraction",
        FIRST,
        "if high, the reward is too coarse, or prompts are too easy or too hard",
    ),
    Metric("mi/groups/zero_variance", "groups without reward variance", "fraction", FIRST),
    *(
        Metric(f"mi/trajectory/{{turn}}/{key}", says, unit, SAMPLE, mind)
        for key, says, unit, mind in (
            (
                "retrieval_accuracy",
                "the same for one turn",
                "fraction",
                "act when only late turns fall: the model stops reading the environment's answers",
            ),
            ("retrieval_chance", "", "fraction", ""),
            ("mi_seq", "", "nats", ""),
            ("conditional_entropy_token", "", "nats per token", ""),
            ("num_completions", "", "count", ""),
        )
    ),
    *(
        Metric(f"mi/trajectory/without_own_words/{key}", says, unit, SAMPLE, mind)
        for key, says, unit, mind in (
            (
                "retrieval_accuracy",
                "the same for later turns, [the model's earlier words left out](diagnosing.md#later-turns)",
                "fraction",
                "act when it is at chance",
            ),
            ("retrieval_chance", "", "fraction", ""),
            ("num_completions", "", "count", ""),
        )
    ),
    Metric(
        ANSWER_PROMPT,
        "how often an answer is likelier after its own prompt and another sample's reasoning than after another "
        "prompt and its reasoning; chance is 0.5",
        "fraction",
        ANSWERS,
        "does not separate use through the reasoning from use past it. First turns only; with `same_across` at s, "
        "hardly above 1 - s/2",
        label="answers: prompt win rate",
    ),
    Metric(
        ANSWER_THOUGHT,
        "loss of an answer after the reasoning of another prompt (0: none, 1: the answer is impossible), and its "
        "standard error over answers",
        "bits",
        ANSWERS,
        "near 0, the answer does not rest on the reasoning; a high value does not prove that it does "
        "([why](answers.md))",
        label="answers: thought swap",
    ),
    Metric("mi/answer/thought_swap_standard_error", "", "bits", ANSWERS),
    Metric(
        "mi/answer/thought_swap_in_group_bits",
        "the same with another sample's reasoning of the same prompt: at most I(A;Z given X)",
        "bits",
        ANSWERS,
        "first turns only; says nothing if samples of a prompt reason alike",
    ),
    Metric(
        "mi/answer/prompt_swap_bits",
        "the same with another prompt and its own reasoning",
        "bits",
        ANSWERS,
        "at 0 the prompt may still act through the reasoning",
    ),
    Metric("mi/answer/same_in_group", "answers shared with another sample of the prompt", "fraction", ANSWERS),
    Metric(
        "mi/answer/same_across",
        "pairs of different prompts with the same answer",
        "fraction",
        ANSWERS,
        "act near 1",
    ),
    Metric("mi/answer/num_swaps", "answers behind `thought_swap_bits` and `prompt_win_rate`", "count", ANSWERS),
    Metric("mi/answer/num_compared", "", "count", ANSWERS),
    Metric(
        "mi/answer/without_answer",
        "turns in which no answer was found",
        "fraction",
        ANSWERS,
        "they were cut off, or need `answer=`",
    ),
    Metric(
        "mi/step",
        "first optimizer step that trains on the completions measured; a row has the number of its last step",
        "step",
        SAMPLE,
    ),
    Metric(
        "mi/pooled_steps",
        "age of the oldest completions, where generations of fewer than `min_prompts` (8) groups are pooled",
        "steps",
        SAMPLE,
    ),
    Metric("mi/seconds", "time, and tokens scored", "seconds", SAMPLE, "larger `every` or fewer `num_completions`"),
    Metric("mi/tokens", "", "tokens", SAMPLE),
)

SNR = (
    Metric(
        GENERATION,
        "number of the newest generation behind the row's `snr/*`, from 1 in the run",
        "count",
        RUN,
        "rows that reuse a generation repeat it; the column `generation` of completions saved by TRL has it, too",
    ),
    Metric(
        "snr/kept_groups",
        "groups with at least one kept completion",
        "count",
        GROUPS,
        "with dynamic sampling, the batch has `snr/trained_groups`",
    ),
    Metric(
        KEPT,
        "completions kept (also groups, if kept whole), and the same in completion tokens",
        "fraction",
        COMPLETIONS,
        "not `snr_value`, the share of reward variance: few groups often hold 0.9 of it (3.2 of 8 in the paper's "
        "Table 7)",
        label="completions kept",
        shown=True,
        health="kept",
    ),
    Metric("snr/kept_tokens_fraction", "", "fraction", COMPLETIONS),
    Metric(
        COMPUTE,
        "positions that the update computed, with padding, old and reference log-probs, over plain TRL's",
        "fraction",
        PASS,
        "generation and PPO's old values are not included",
        label="update compute",
        shown=True,
    ),
    Metric(
        EMPTY_STEPS,
        "optimizer steps without a kept group",
        "count",
        RUN,
        label="steps without a kept group",
        shown=True,
    ),
    Metric(
        ZERO_VARIANCE,
        "groups without reward variance",
        "fraction",
        GROUPS,
        "the next three tell too easy from too hard",
        label="groups without reward variance",
        health="zero_variance",
    ),
    Metric(
        "snr/dropped_all_best",
        "dropped groups with only the best reward: that of a solved task if one of our tasks gives the whole reward, "
        "else the best so far",
        "fraction",
        GROUPS,
        "does not count groups with 0.3 for all, for example",
    ),
    Metric("snr/dropped_all_worst", "dropped groups with only the worst reward", "fraction", GROUPS),
    Metric(
        "snr/dropped_all_same", "dropped groups of equal rewards, not known to be best or worst", "fraction", GROUPS
    ),
    Metric(
        "snr/in_group_max",
        "best and mean reward of a group, means over groups; the difference is the gain from always reaching the best",
        "reward",
        GROUPS,
        "`ragen2-trl report` shows the groups",
    ),
    Metric("snr/in_group_mean", "", "reward", GROUPS),
    Metric("snr/score_mean", "mean and maximum of the ranking score, by default reward variance", "score", GROUPS),
    Metric("snr/score_max", "", "score", GROUPS),
    Metric(
        "snr/reward_std_spread",
        "standard deviation over mean of the groups' reward standard deviations. Paper, Table 8: gains at 1.16 and "
        "1.29, a loss at 0.33",
        "ratio",
        RANKED,
        "[inconclusive here](../research/results/tab8.md) as a sign that the filter helps",
    ),
    Metric(
        "snr/reward_variance_spread", "the same of their variances", "ratio", RANKED, "not comparable with Table 8"
    ),
    Metric("snr/sampling_rounds", "rounds of sampling, prompts sampled, groups in the final batch", "count", STEP),
    Metric("snr/prompts_used", "", "count", STEP),
    Metric("snr/trained_groups", "", "count", STEP),
    Metric(
        "snr/waiting_groups",
        "surplus groups: carried to the next step, taken from the last step, discarded as too old",
        "count",
        STEP,
    ),
    Metric("snr/carried_groups", "", "count", STEP),
    Metric("snr/stale_groups", "", "count", STEP),
    Metric(
        "snr/sampled_completions",
        "completions sampled, also as a share of whole groups for all prompts",
        "count",
        STEP,
    ),
    Metric("snr/sampled_fraction", "", "fraction", STEP),
    Metric(
        "snr/committed_fraction",
        "prompts sampled whole, without audited ones",
        "fraction",
        "all prompts",
        "not the share worth sampling: all processes sample equally many",
    ),
    Metric(
        "snr/pilot_reward",
        "mean reward of all pilots, to which each prompt adds as many; to `reward`, prompts sampled whole add more",
        "reward",
        "all pilots",
    ),
    Metric(
        "snr/missed_variance",
        "estimated share of reward variance in prompts not sampled whole, from the 2 % of them that are audited; not "
        "logged before the first",
        "fraction",
        RUN,
        "says little after few steps ([how](mathematics.md#pilots))",
    ),
    Metric(
        "snr/sampled_staleness",
        "asynchronous trainer: weight versions by which the trainer is ahead when a group arrives",
        "count",
        GROUPS,
        "TRL's `ratio` and `kl` show how far the policy moved",
    ),
    Metric(
        PREDICTED,
        "with `snr_prompt_selection`: mean predicted reward variance of the prompts",
        "reward squared",
        FIRST,
        "the report has a figure by prompt",
    ),
    Metric(REALISED, "mean reward variance of their groups", "reward squared", FIRST, "act when it differs for long"),
    Metric(
        CORRELATION,
        "Spearman's correlation of the two; about 0 in the first epoch, not logged while either is constant",
        "correlation",
        "latest 256 groups",
        "variances of small groups are noisy and limit it",
    ),
    Metric(
        SKIPPED,
        "candidates passed over for the first prompts of a generation",
        "count",
        STEP,
        "their rewards might have varied",
    ),
    Metric(
        "snr/oldest_unseen",
        "prompts sampled since the least recently sampled prompt, or since the start",
        "count",
        RUN,
    ),
)

GRAD = (
    Metric(
        "grad/{bucket}/{part}/norm",
        "norm of the mean sample's gradient, coefficient included; bucket 1 has the lowest variance",
        "norm",
        GRADIENT_SAMPLE,
        "with few samples mostly noise",
    ),
    Metric(
        "grad/{bucket}/{part}/squared_norm_debiased",
        "the squared norm without that noise: inner product of two halves, each with half of every group's "
        "completions; may be below 0",
        "norm squared",
        GRADIENT_SAMPLE,
        "unbiased, but a single measurement is uncertain",
    ),
    Metric(
        "grad/{bucket}/{part}/half_cosine",
        "cosine between the gradients of the two halves: 1 is signal, 0 noise",
        "cosine",
        GRADIENT_SAMPLE,
        "grows with the batch size",
    ),
    Metric(
        "grad/{bucket}/{part}/cosine",
        "cosine with the gradient of the whole batch",
        "cosine",
        GRADIENT_SAMPLE,
        "the bucket is part of the batch, which raises it",
    ),
    Metric(
        "grad/{bucket}/regulariser_share",
        "norms of the regularisers over norms of all terms (paper, Appendix K); not logged if all are rounding",
        "fraction",
        GRADIENT_SAMPLE,
        "noise included",
    ),
    Metric(
        "grad/{bucket}/reward_std",
        "mean and lowest reward standard deviation of the groups",
        "reward",
        GRADIENT_SAMPLE,
    ),
    Metric("grad/{bucket}/min_reward_std", "", "reward", GRADIENT_SAMPLE),
    Metric(
        "grad/batch_norm",
        "norm of the whole batch's gradient, before filter and clipping: without a filter, `grad_norm`",
        "norm",
        FIRST,
    ),
    Metric(
        "grad/seconds",
        "time, and positions computed: the batch forward and backward twice for each term",
        "seconds",
        FIRST,
    ),
    Metric("grad/tokens", "", "tokens", FIRST),
)

PPO = (
    Metric(
        "ppo/value_loss",
        "mean of half the squared error of values, clipped, before `value_coef`",
        "reward squared",
        LOSS,
        "scales with the rewards, squared",
    ),
    Metric(
        "ppo/explained_variance",
        "share of the variance of returns that the critic predicts before the update; below 0 is worse than their "
        "mean; not logged if they do not vary",
        "fraction",
        LOSS,
        "mostly noise if that variance is small",
    ),
    Metric("ppo/return_mean", "mean return from a token on", "reward", LOSS),
)

ENV = (
    Metric(
        "env/{task}/success",
        "episodes that solve the task; with several tasks, `all` has all episodes",
        "fraction",
        EPISODES,
        "held-out tasks are in `eval/env/<task>/success`",
        label="success in training",
        health="success",
    ),
    Metric("env/{task}/return", "mean return, the reward of an episode", "reward", EPISODES),
    Metric(
        "env/{task}/pass@{k}",
        "prompts with at least one solved among their k completions; not logged with pilots",
        "fraction",
        GROUPS,
        "far above `success`, there is much to learn",
    ),
    Metric("env/{task}/turns", "mean turns of an episode", "turns", EPISODES),
    Metric(
        "env/{task}/valid_rate",
        "turns in the required format",
        "fraction",
        EPISODES,
        f"closed reasoning is `{VALID_THINKING}`",
        health="valid",
    ),
    Metric(
        "env/{task}/failed",
        "episodes that a lost connection or a time-out ended: without a reward, and left out of the other means",
        "fraction",
        EPISODES,
        "above a twentieth of a generation the run ends",
    ),
    Metric("env/{task}/num_actions", "mean actions carried out in an episode", "count", EPISODES),
    Metric(
        "env/{task}/action_is_valid",
        "share of an episode's turns with an action carried out, mean over episodes",
        "fraction",
        EPISODES,
        "`valid_rate` averages over turns instead",
        health="valid",
    ),
    Metric(
        "env/{task}/action_is_effective",
        "share of an episode's turns whose last action changed the state or ended the episode, mean over episodes",
        "fraction",
        EPISODES,
        "such an action need not be good; 0 where nothing can change (Bandit)",
    ),
)

HEALTH = (
    Metric("health/completions", "completions behind the shares of this row", "count", FIRST),
    Metric(
        "health/valid_rate",
        "turns with closed reasoning, or completions accepted by `valid=`; not logged beside `env/*/valid_rate`",
        "fraction",
        FIRST,
        "act when health says so",
        health="valid",
    ),
)

EVAL = (
    Metric(
        "eval/env/{task}/success{bound}",
        "held-out episodes that solve the task",
        "fraction",
        HELD_OUT,
        "training samples at another temperature; the best of many evaluations may be lower on other tasks",
        label="held-out success",
        health="held_out_success",
    ),
    Metric(
        "eval/env/{task}/random_success",
        "success of the random baseline on the same tasks; not logged where judging is expensive",
        "fraction",
        HELD_OUT,
    ),
    Metric("eval/env/{task}/return{bound}", "mean return", "reward", HELD_OUT),
    Metric(
        "eval/env/{task}/pass@{k}{bound}",
        "chance that one of k samples solves a task, for k = 1, 2, 4, …",
        "fraction",
        HELD_OUT,
    ),
    Metric(
        "eval/env/{task}/valid_rate{bound}",
        "means over episodes: share of turns in the required format, turns, tokens that the model wrote",
        "fraction",
        HELD_OUT,
    ),
    Metric("eval/env/{task}/turns{bound}", "", "turns", HELD_OUT),
    Metric("eval/env/{task}/completion_length{bound}", "", "tokens", HELD_OUT),
    Metric(
        "eval/env/{task}/failed",
        "episodes left out since a lost connection or a time-out ended them; logged if there are any",
        "fraction",
        HELD_OUT,
    ),
    Metric("eval/env/{task}/num_prompts", "held-out tasks, and episodes of each", "count", HELD_OUT),
    Metric("eval/env/{task}/num_samples", "", "count", HELD_OUT),
    Metric("eval/seconds", "time of evaluating, all tasks together", "seconds", HELD_OUT),
)

COST = (
    Metric(
        "cost/seconds",
        "wall clock of training: sampling, rewards, updates",
        "seconds",
        RUN,
        "leaves out evaluations, checkpoints, logging and measurements; depends on how busy the machine is",
    ),
    Metric(
        "cost/cpu_seconds",
        "CPU time of the same; fairer on a busy machine",
        "seconds",
        RUN,
        "leaves out GPUs and programs in the sandbox",
    ),
    Metric(
        "cost/sampled_tokens",
        "tokens and completions sampled in training, dropped groups included",
        "tokens",
        RUN,
        "leaves out tokens of prompts",
    ),
    Metric("cost/sampled_completions", "", "count", RUN),
    Metric(
        "cost/plain_completions",
        "completions of plain TRL for as many generations",
        "count",
        RUN,
        "plain TRL may need more or fewer to come as far",
    ),
    Metric("cost/update_rows", "rows that updates trained on, once for each generation", "count", RUN),
    Metric(
        "cost/update_positions",
        "positions of all passes over a generation, as in `snr/update_compute_fraction`; the same of plain TRL",
        "tokens",
        RUN,
        "leaves out a separate critic's, and passes for PPO's old values",
    ),
    Metric("cost/plain_update_positions", "", "tokens", RUN),
    Metric(
        "cost/update_tokens",
        "positions forward and backward, with padding and a separate critic's",
        "tokens",
        RUN,
    ),
    Metric(
        "cost/update_flops",
        "6 x parameters x those positions: 2 forward, 2 back to activations, 2 for gradients of trained parameters",
        "operations",
        RUN,
        "leaves out the quadratic part of attention, gradient checkpointing and sampling",
    ),
)

TRL = (
    Metric(REWARD, "mean of all rewards", "reward", COMPLETIONS, label="reward in training", health="reward"),
    Metric(
        "reward_std",
        "standard deviation of all rewards of a generation",
        "reward",
        COMPLETIONS,
        "over the whole batch: groups need not vary",
        health="reward_std",
    ),
    Metric(
        "frac_reward_zero_std",
        "groups without reward variance",
        "fraction",
        GROUPS,
        "TRL's own: rounding (0.7 for all) and RLOO's KL penalty hide such groups, and with "
        f'`scale_rewards="batch"` it is about the whole batch. `{ZERO_VARIANCE}` counts equal rewards',
        health="zero_variance",
    ),
    Metric(
        ENTROPY,
        "mean entropy of the next token",
        "nats per token",
        LOSS,
        "says nothing about the prompt",
        label="policy entropy",
        health="entropy",
    ),
    *(
        Metric(
            f"clip_ratio/{name}",
            says,
            "fraction",
            LOSS,
            "0 with one optimizer step per generation, unless groups are carried over"
            if name == "region_mean"
            else "",
            health="clip_ratio" if name == "region_mean" else "",
        )
        for name, says in (
            ("region_mean", "tokens whose update was clipped"),
            ("low_mean", "the same from below and from above; also the lowest and highest of the processes"),
            ("low_min", ""),
            ("high_mean", ""),
            ("high_max", ""),
        )
    ),
    Metric("completions/mean_length", "tokens of a completion", "tokens", COMPLETIONS, health="length"),
    Metric(CLIPPED, "completions cut off at `max_completion_length`", "fraction", COMPLETIONS, health="clipped"),
    Metric("kl", "distance to the reference model, with `beta` above 0", "nats per token", LOSS),
    Metric("loss", "the loss", "", LOSS, "GRPO's is near 0 by construction"),
    Metric("grad_norm", "gradient norm of the row's latest step with trained rows", "norm", LOSS, health="grad_norm"),
)

FAMILIES = {
    "mi": MI,
    "snr": SNR,
    "grad": GRAD,
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
