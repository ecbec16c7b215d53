"""Every logged metric once: what it says, its unit, the rows it speaks for, and whether it is shown by default.

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
SCOPES = ("first_turn", "trajectory", "trajectory_reference")
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
PREDICTED, REALISED = "snr/predicted_variance", "snr/realised_variance"
CORRELATION, SKIPPED = "snr/prediction_rank_correlation", "snr/skipped_prompts"
REWARD, ENTROPY, CLIPPED = "reward", "entropy", "completions/clipped_ratio"

# Which rows a metric speaks for.
GROUPS = "all groups"  # of the step, further rounds included
COMPLETIONS = "all completions"  # of the step, further rounds included
FIRST = "first groups"  # of the step: without further rounds
SAMPLE = "sampled traces"  # `num_completions` of them
ANSWERS = "sampled answers"  # 16 to 64
LOSS = "rows in the loss"
PASS = "one pass over a generation"
STEP = "the step"
RUN = "the run so far"
EPISODES = "all episodes"  # of the step, further rounds included
HELD_OUT = "held-out episodes"
GRADIENT_SAMPLE = "sampled groups"  # of each bucket


@dataclass(frozen=True)
class Metric:
    """One logged key, or several that a pattern covers.

    Args:
        name: The key; `{...}` for a place in `PLACES`.
        says: What the number is.
        unit: `fraction`, `nats`, `tokens`, `count`, ...; it decides how `text` writes a value.
        rows: The rows, groups or steps that it speaks for.
        mind: What it does not say, or when to act.
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
        """A value as tables write it.

        >>> metric("snr/kept_fraction").text(0.5), metric("mi/first_turn/mi_seq").text(-0.001)
        ('50.0%', '0.00')
        """
        if self.unit == "fraction":
            return f"{value:.1%}"
        return f"{round(value, 2) + 0.0:.2f}" if self.unit.startswith("nats") else f"{value:.3f}"


MI = (
    Metric(
        "mi/{scope}/retrieval_accuracy",
        "how often a reasoning trace is most likely under its own prompt",
        "fraction",
        SAMPLE,
        "by how much, or whether [training fails](diagnosing.md#is-training-working): in real runs it fell while "
        "success rose",
        label="retrieval accuracy",
        shown=True,
    ),
    Metric(
        "mi/{scope}/retrieval_chance", "how often guessing would find it", "fraction", SAMPLE, "", "chance", shown=True
    ),
    Metric(
        "mi/{scope}/mi_seq",
        "mutual information of a trace and its prompt; if there is none, 0, or below 0 by chance",
        "nats",
        SAMPLE,
        "anything beyond the bound, log N for N prompts",
        label="I(X;Z)",
        shown=True,
    ),
    Metric("mi/{scope}/mi_upper_bound", "the most that `mi_seq` can be", "nats", SAMPLE, "", "at most", shown=True),
    Metric(
        "mi/{scope}/retrieval_accuracy@{k}",
        "how often its own prompt is among the best k (2, 4, 8); shows a drift first if prompts come in kinds",
        "fraction",
        SAMPLE,
        "much, with few prompts",
    ),
    Metric("mi/{scope}/retrieval_chance@{k}", "how often guessing would find it", "fraction", SAMPLE),
    Metric(
        "mi/{scope}/mi_token",
        "`mi_seq` per token, the paper's form",
        "nats per token",
        SAMPLE,
        "whether reasoning got worse or only longer",
    ),
    Metric(
        "mi/{scope}/mi_token_tempered",
        "mutual information as the reference code logs it, to compare with published curves",
        "",
        SAMPLE,
        "mutual information proper: it has no bound",
    ),
    Metric(
        "mi/{scope}/conditional_entropy_token",
        "how much reasoning varies for the same prompt, per token",
        "nats per token",
        SAMPLE,
        "whether the variety has to do with the prompt",
        label="H(Z|X)",
    ),
    Metric("mi/{scope}/conditional_entropy_seq", "the same of a whole trace", "nats", SAMPLE),
    Metric(
        "mi/{scope}/marginal_entropy_token",
        "how much reasoning varies over all prompts, per token",
        "nats per token",
        SAMPLE,
        "anything new: it is the sum of conditional entropy and MI",
        label="H(Z)",
    ),
    Metric("mi/{scope}/marginal_entropy_seq", "the same of a whole trace", "nats", SAMPLE),
    *(
        Metric(
            f"mi/{{scope}}/{name}_{{form}}",
            f"`mi_<form>` over {spread} (paper, Table 1)",
            "",
            SAMPLE,
            "anything if the deviation is near 0",
        )
        for name, spread in (
            ("mi_zscore", "the standard deviation of the marginal"),
            ("mi_zscore_ema", "the running mean of that deviation"),
        )
    ),
    Metric("mi/{scope}/marginal_std_{form}", "the standard deviation of the marginal", "nats, or per token", SAMPLE),
    Metric("mi/{scope}/num_prompts", "distinct prompts of the measurement", "count", SAMPLE),
    Metric("mi/{scope}/num_completions", "reasoning traces of the measurement", "count", SAMPLE),
    Metric(
        "mi/regime/conclusive",
        "1 if there is a [verdict](diagnosing.md#verdicts)",
        "0 or 1",
        "measurements so far",
    ),
    Metric("mi/regime/depends_on_prompt", "1 if reasoning depends on its prompt", "0 or 1", "measurements so far"),
    Metric("mi/regime/low_entropy", "1 if entropy is low", "0 or 1", "measurements so far"),
    Metric(
        "mi/regime/collapsed",
        "1 if reasoning has stopped depending on its prompt",
        "0 or 1",
        "measurements so far",
        "act when it is 1; each collapse has one warning, unless entropy is low",
    ),
    Metric(
        VALID_THINKING,
        "share of turns whose reasoning ends with `</think>`",
        "fraction",
        SAMPLE,
        "act when `health` calls it failing; a model without tags has 0, and all it writes counts as reasoning",
        label="closed reasoning",
        shown=True,
        health="valid_thinking",
    ),
    Metric(
        "mi/completions_without_reasoning",
        "completions with nothing to score",
        "count",
        SAMPLE,
        "act when it is more than a few",
    ),
    Metric(
        "mi/groups/identical_completions",
        "groups whose completions are all the same",
        "fraction",
        FIRST,
        "act when it rises: the policy has become deterministic",
    ),
    Metric(
        "mi/groups/equal_rewards",
        "groups whose completions differ and whose rewards do not",
        "fraction",
        FIRST,
        "act when it is high: the reward is too coarse, too easy or too hard",
    ),
    Metric(
        "mi/groups/zero_variance",
        "groups whose rewards do not vary",
        "fraction",
        FIRST,
    ),
    *(
        Metric(f"mi/trajectory/{{turn}}/{key}", f"`{key}` of one turn alone", unit, SAMPLE, mind)
        for key, unit, mind in (
            (
                "retrieval_accuracy",
                "fraction",
                "act when only late turns fall: the model stops reading the environment's answers",
            ),
            ("retrieval_chance", "fraction", ""),
            ("mi_seq", "nats", ""),
            ("conditional_entropy_token", "nats per token", ""),
            ("num_completions", "count", ""),
        )
    ),
    *(
        Metric(
            f"mi/trajectory/without_own_words/{key}",
            f"`{key}` of later turns, [the model's earlier words left out](diagnosing.md#later-turns)",
            unit,
            SAMPLE,
            mind,
        )
        for key, unit, mind in (
            ("retrieval_accuracy", "fraction", "act when it is at chance"),
            ("retrieval_chance", "fraction", ""),
            ("num_completions", "count", ""),
        )
    ),
    Metric(
        "mi/trajectory_reference/verbatim_elsewhere",
        "traces repeated in the context of another draw ([form](mathematics.md#several-turns))",
        "fraction",
        SAMPLE,
        "anything to act on",
    ),
    Metric(
        ANSWER_PROMPT,
        "how often an answer is likelier after its own prompt and another sample's reasoning than after another "
        "prompt and its reasoning; chance is 0.5",
        "fraction",
        ANSWERS,
        "whether through the reasoning or past it. First turns only; with `same_across` at s, hardly above 1 - s/2",
        label="answers: prompt win rate",
    ),
    Metric(
        ANSWER_THOUGHT,
        "loss of an answer if another prompt's reasoning replaces its own: 0 is none, 1 makes it impossible",
        "bits",
        ANSWERS,
        "that the answer rests on the reasoning, if high; near 0 it does not ([why](answers.md))",
        label="answers: thought swap",
    ),
    Metric("mi/answer/thought_swap_standard_error", "its standard error over answers", "bits", ANSWERS),
    Metric(
        "mi/answer/thought_swap_in_group_bits",
        "the same with another sample's reasoning of the same prompt: at most I(A;Z given X)",
        "bits",
        ANSWERS,
        "anything if samples of a prompt reason alike. First turns only",
    ),
    Metric(
        "mi/answer/prompt_swap_bits",
        "the same if another prompt replaces its own, the reasoning kept",
        "bits",
        ANSWERS,
        "that the prompt does not matter, if 0: it may act through the reasoning",
    ),
    Metric("mi/answer/same_in_group", "answers that another sample of the prompt gives as well", "fraction", ANSWERS),
    Metric(
        "mi/answer/same_across",
        "pairs of different prompts with the same answer",
        "fraction",
        ANSWERS,
        "act when it is near 1",
    ),
    Metric("mi/answer/num_swaps", "answers behind `thought_swap_bits`", "count", ANSWERS),
    Metric("mi/answer/num_compared", "answers behind `prompt_win_rate`", "count", ANSWERS),
    Metric(
        "mi/answer/without_answer",
        "turns in which no answer was found",
        "fraction",
        ANSWERS,
        "whether they were cut off or need `answer=`",
    ),
    Metric(
        "mi/pooled_steps",
        "age of the oldest completions, if a generation has fewer than `min_prompts` (8) groups and several are "
        "pooled",
        "steps",
        SAMPLE,
        "how far those steps moved the policy",
    ),
    Metric("mi/seconds", "time of the measurement", "seconds", SAMPLE, "act with a larger `every`"),
    Metric("mi/tokens", "tokens that the measurement scored", "tokens", SAMPLE, "act with fewer `num_completions`"),
)

SNR = (
    Metric(
        "snr/kept_groups",
        "groups with at least one kept completion",
        "count",
        GROUPS,
        "groups in the batch, with dynamic sampling: `snr/trained_groups`",
    ),
    Metric(
        KEPT,
        "completions kept; also groups, if kept whole",
        "fraction",
        COMPLETIONS,
        "the share of reward variance, which is `snr_value`: few groups often hold 0.9 of it (3.2 of 8 in the paper's "
        "Table 7)",
        label="completions kept",
        shown=True,
        health="kept",
    ),
    Metric("snr/kept_tokens_fraction", "the same, in completion tokens", "fraction", COMPLETIONS),
    Metric(
        COMPUTE,
        "positions that the update computed, with padding and old log-probs, over plain TRL's",
        "fraction",
        PASS,
        "time: generation is not in it",
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
        "groups whose rewards do not vary",
        "fraction",
        GROUPS,
        "whether they were too easy or too hard",
        label="groups without reward variance",
        health="zero_variance",
    ),
    Metric(
        "snr/dropped_all_best",
        "dropped groups in which all rewards are the best: that of a solved task if one of our tasks gives all of the "
        "reward, else the best so far",
        "fraction",
        GROUPS,
        "groups with 0.3 for all, for example",
    ),
    Metric("snr/dropped_all_worst", "dropped groups in which all rewards are the worst", "fraction", GROUPS),
    Metric(
        "snr/dropped_all_same",
        "dropped groups in which all rewards are equal, not known to be best or worst",
        "fraction",
        GROUPS,
        "why",
    ),
    Metric(
        "snr/in_group_max",
        "best reward of a group, mean over groups; less `in_group_mean`, the gain of always doing its best",
        "reward",
        GROUPS,
        "which groups: see `ragen2-trl report`",
    ),
    Metric("snr/in_group_mean", "mean reward of a group, mean over groups", "reward", GROUPS),
    Metric("snr/score_mean", "mean of the score that ranks groups, by default reward variance", "score", GROUPS),
    Metric("snr/score_max", "largest score", "score", GROUPS),
    Metric(
        "snr/reward_std_spread",
        "standard deviation over mean of the groups' reward standard deviations. Paper, Table 8: gains at 1.16 and "
        "1.29, a loss at 0.33",
        "ratio",
        "groups in the ranking",
        "whether the filter helps: [inconclusive here](../research/results/tab8.md)",
    ),
    Metric(
        "snr/reward_variance_spread",
        "the same of their variances",
        "ratio",
        "groups in the ranking",
        "anything to compare with Table 8",
    ),
    Metric("snr/sampling_rounds", "with dynamic sampling: rounds of sampling", "count", STEP),
    Metric("snr/prompts_used", "with dynamic sampling: prompts that were sampled", "count", STEP),
    Metric("snr/trained_groups", "with dynamic sampling: groups in the batch in the end", "count", STEP),
    Metric("snr/waiting_groups", "with dynamic sampling: surplus groups kept for the next step", "count", STEP),
    Metric("snr/carried_groups", "with dynamic sampling: groups taken over from the last step", "count", STEP),
    Metric("snr/stale_groups", "with dynamic sampling: groups left behind as too old", "count", STEP),
    Metric("snr/sampled_completions", "with `snr_pilot_generations`: completions sampled", "count", STEP),
    Metric("snr/sampled_fraction", "the same, as a share of all places that the prompts had", "fraction", STEP),
    Metric(
        "snr/committed_fraction",
        "with pilots: prompts sampled whole, audited ones left out",
        "fraction",
        "all prompts of the step",
        "how many were worth it: all processes sample equally many",
    ),
    Metric(
        "snr/pilot_reward",
        "mean reward of all pilots; `reward` is that of the prompts sampled whole",
        "reward",
        "all pilots of the step",
    ),
    Metric(
        "snr/missed_variance",
        "estimated share of reward variance in prompts not sampled whole, from the 2 % of them that are audited; not "
        "logged before the first",
        "fraction",
        RUN,
        "much after few steps ([how](mathematics.md#pilots))",
    ),
    Metric(
        "snr/sampled_staleness",
        "asynchronous trainer: weight versions that the trainer is ahead when a group arrives",
        "count",
        GROUPS,
        "how far the policy moved: TRL's `ratio` and `kl`",
    ),
    Metric(
        PREDICTED,
        "with `snr_prompt_selection`: mean predicted reward variance of the prompts",
        "reward squared",
        FIRST,
        "which prompts: see the report's figure",
    ),
    Metric(
        REALISED,
        "mean reward variance of their groups; act when it differs for long",
        "reward squared",
        FIRST,
    ),
    Metric(
        CORRELATION,
        "Spearman's correlation of the two; about 0 in the first epoch, not logged while either is constant",
        "correlation",
        "the latest 256 groups",
        "how good it could be: variances of small groups are noisy",
    ),
    Metric(
        SKIPPED,
        "candidates passed over for the first prompts of a generation",
        "count",
        STEP,
        "that their rewards would not vary",
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
        "norm of the gradient of the mean sample, coefficient included; bucket 1 has the lowest variance",
        "norm",
        GRADIENT_SAMPLE,
        "how much of it is signal: with few samples most of it is noise",
    ),
    Metric(
        "grad/{bucket}/{part}/squared_norm_debiased",
        "the squared norm without that noise: inner product of two halves with half of each group's completions; may "
        "be below 0",
        "norm squared",
        GRADIENT_SAMPLE,
        "much from one measurement: it is unbiased, not certain",
    ),
    Metric(
        "grad/{bucket}/{part}/half_cosine",
        "cosine between the gradients of the two halves: 1 is signal, 0 noise",
        "cosine",
        GRADIENT_SAMPLE,
        "anything about other batch sizes: it grows with them",
    ),
    Metric(
        "grad/{bucket}/{part}/cosine",
        "cosine with the gradient of the whole batch",
        "cosine",
        GRADIENT_SAMPLE,
        "that a bucket is useful: it is part of the batch",
    ),
    Metric(
        "grad/{bucket}/regulariser_share",
        "norms of the regularisers over norms of all terms (paper, Appendix K); not logged if all are rounding",
        "fraction",
        GRADIENT_SAMPLE,
        "the same without noise",
    ),
    Metric("grad/{bucket}/reward_std", "mean reward standard deviation of the groups", "reward", GRADIENT_SAMPLE),
    Metric(
        "grad/{bucket}/min_reward_std",
        "the lowest of them",
        "reward",
        GRADIENT_SAMPLE,
    ),
    Metric(
        "grad/batch_norm",
        "norm of the gradient of the whole batch, before filter and clipping: without a filter, `grad_norm`",
        "norm",
        FIRST,
    ),
    Metric("grad/seconds", "time of the measurement", "seconds", FIRST),
    Metric("grad/tokens", "positions computed: the batch forward and backward twice for each term", "tokens", FIRST),
)

PPO = (
    Metric(
        "ppo/value_loss",
        "mean of half the squared error of values, clipped, before `value_coef`",
        "reward squared",
        LOSS,
        "how good values are: it has the scale of the rewards, squared",
    ),
    Metric(
        "ppo/explained_variance",
        "share of the variance of returns that the critic predicts before the update; below 0 is worse than their "
        "mean; not logged if they do not vary",
        "fraction",
        LOSS,
        "how large that variance is; if small, most is noise",
    ),
    Metric("ppo/return_mean", "mean return from a token on", "reward", LOSS),
)

ENV = (
    Metric(
        "env/{task}/success",
        "episodes that solve the task; with several tasks, `all` has all episodes",
        "fraction",
        EPISODES,
        "success on held-out tasks (`eval/env/<task>/success`)",
        label="success in training",
        health="success",
    ),
    Metric("env/{task}/return", "mean return, the reward of an episode", "reward", EPISODES),
    Metric(
        "env/{task}/pass@{k}",
        "prompts with at least one solved among their k completions; far above `success`, there is much to learn. Not "
        "logged with pilots",
        "fraction",
        GROUPS,
        "anything if it equals `success`",
    ),
    Metric("env/{task}/turns", "mean turns of an episode", "turns", EPISODES),
    Metric(
        "env/{task}/valid_rate",
        "turns in the required format",
        "fraction",
        EPISODES,
        f"whether reasoning is closed: `{VALID_THINKING}`",
        health="valid",
    ),
    Metric(
        "env/{task}/num_actions", "mean actions carried out in an episode", "count", EPISODES, "whether they helped"
    ),
    Metric(
        "env/{task}/action_is_valid",
        "share of an episode's turns with an action carried out, mean over episodes",
        "fraction",
        EPISODES,
        "the same as `valid_rate`, which counts turns, not episodes",
        health="valid",
    ),
    Metric(
        "env/{task}/action_is_effective",
        "share of an episode's turns whose last action changed the state or ended the episode, mean over episodes",
        "fraction",
        EPISODES,
        "a good action; 0 where nothing can change (Bandit)",
    ),
)

HEALTH = (
    Metric("health/completions", "completions behind the shares of this row", "count", FIRST),
    Metric(
        "health/valid_rate",
        "turns whose reasoning is closed by its tag, or completions that `valid=` accepts; not logged beside "
        "`env/*/valid_rate`",
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
        "success in training (another temperature), or that the best of many evaluations is as good on other tasks",
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
        "share of an episode's turns in the required format, mean over episodes",
        "fraction",
        HELD_OUT,
    ),
    Metric("eval/env/{task}/turns{bound}", "mean turns of an episode", "turns", HELD_OUT),
    Metric("eval/env/{task}/completion_length{bound}", "mean tokens that the model wrote", "tokens", HELD_OUT),
    Metric("eval/env/{task}/num_prompts", "held-out tasks", "count", HELD_OUT),
    Metric("eval/env/{task}/num_samples", "episodes of each", "count", HELD_OUT),
    Metric("eval/seconds", "time of evaluating, all tasks together", "seconds", HELD_OUT),
)

COST = (
    Metric(
        "cost/seconds",
        "wall clock of training: sampling, rewards, updates",
        "seconds",
        RUN,
        "evaluations, checkpoints, logging, measurements; how busy the machine was",
    ),
    Metric(
        "cost/cpu_seconds",
        "CPU time of the same; fairer on a busy machine",
        "seconds",
        RUN,
        "time of a GPU or of programs in the sandbox",
    ),
    Metric(
        "cost/sampled_tokens",
        "tokens that the model wrote in training, dropped groups included",
        "tokens",
        RUN,
        "prompts",
    ),
    Metric("cost/sampled_completions", "completions sampled, dropped groups included", "count", RUN),
    Metric(
        "cost/plain_completions",
        "completions of plain TRL for as many generations",
        "count",
        RUN,
        "what plain TRL would need to come as far",
    ),
    Metric(
        "cost/update_positions",
        "positions of all passes over a generation, as `snr/update_compute_fraction` counts them",
        "tokens",
        RUN,
        "a separate critic's: those are in `cost/update_tokens`",
    ),
    Metric(
        "cost/plain_update_positions",
        "the same of plain TRL's micro-batches",
        "tokens",
        RUN,
    ),
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
        "the quadratic part of attention, gradient checkpointing, sampling",
    ),
)

TRL = (
    Metric(REWARD, "mean of all rewards", "reward", COMPLETIONS, label="reward in training", health="reward"),
    Metric(
        "reward_std",
        "standard deviation of all rewards of a generation",
        "reward",
        COMPLETIONS,
        "whether any group varies: it is over the whole batch",
        health="reward_std",
    ),
    Metric(
        "frac_reward_zero_std",
        "groups without reward variance",
        "fraction",
        GROUPS,
        f'groups with `scale_rewards="batch"`, where it is about the whole batch; `{ZERO_VARIANCE}` always is about '
        "groups",
        health="zero_variance",
    ),
    Metric(
        ENTROPY,
        "mean entropy of the next token",
        "nats per token",
        LOSS,
        "anything about the prompt",
        label="policy entropy",
        health="entropy",
    ),
    *(
        Metric(
            f"clip_ratio/{name}",
            f"tokens whose update was clipped{where}",
            "fraction",
            LOSS,
            "anything with one optimizer step per generation: it is 0 unless groups are carried over"
            if name == "region_mean"
            else "",
            health="clip_ratio" if name == "region_mean" else "",
        )
        for name, where in (
            ("region_mean", ""),
            ("low_mean", ", from below"),
            ("low_min", ", from below: lowest of the processes"),
            ("high_mean", ", from above"),
            ("high_max", ", from above: highest of the processes"),
        )
    ),
    Metric("completions/mean_length", "tokens of a completion", "tokens", COMPLETIONS, health="length"),
    Metric(CLIPPED, "completions cut off at `max_completion_length`", "fraction", COMPLETIONS, health="clipped"),
    Metric("kl", "distance to the reference model, with `beta` above 0", "nats per token", LOSS),
    Metric("loss", "the loss", "", LOSS, "much: GRPO's is near 0 by construction"),
    Metric(
        "grad_norm",
        "norm of the gradient of the row's latest step that trained on anything",
        "norm",
        LOSS,
        health="grad_norm",
    ),
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
