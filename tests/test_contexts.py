"""What a turn is sampled from, be it the history, its last turns or a memory: it is trained as it was sampled."""

import json

import pytest
import torch
from players import GROUP, LAKE, Player, make_trainer, multi_turn_args
from players import policy_fixture as policy_fixture
from players import tokenizer_fixture as tokenizer_fixture
from replay import Recorder, assert_close, mean_gradient, move_away
from trl import GRPOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredPPOConfig, SNRFilteredPPOTrainer
from ragen2_trl.cli import main
from ragen2_trl.columns import TURN_SAMPLES
from ragen2_trl.envs import format_response, make_env
from ragen2_trl.instrument.reasoning import Trajectories
from ragen2_trl.rollouts import Chat, ContextWindow, TextRollout, play_all
from ragen2_trl.rollouts.context import turn_samples

KINDS = {
    "last": {"context": "last", "context_turns": 2},
    "one": {"context": "last", "context_turns": 1},
    "memory": {"context": "memory"},
    "dropping": {"drop_oldest_turns": True},
}


def played(tokenizer, window, answer=None, count=3, max_turns=5, **limits):
    """Trajectories, and what was asked for each in order."""
    env = make_env("frozen_lake", **LAKE, max_turns=max_turns)
    rows = env.dataset(count, seed=0)
    plays = env.plays(rows["seed"][:], {"grid": rows["grid"][:]})
    asked = []

    def generate(contexts, limit):
        asked.append(contexts)
        texts = [
            (answer or (lambda turn: format_response(f"Thought {turn}.", ["Jump"])))(len(asked)) for _ in contexts
        ]
        return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id][:limit] for text in texts], None

    limits = {"max_tokens": 400, **limits}
    trajectories = play_all(plays, rows["prompt"][:], Chat(tokenizer), generate, window=window, **limits)
    return rows, trajectories, asked


def assert_sampled_as_trained(trajectories, asked):
    """Every answer stands behind the very context that it was sampled from."""
    seen = []
    for trajectory in trajectories:
        turns = iter(trajectory.answers)
        for sample in trajectory.samples:
            ids, mask = sample.completion_ids, [0, *sample.env_mask]
            starts = [place for place in range(len(ids)) if mask[place + 1] and not mask[place]]
            seen += [sample.prompt_ids + ids[:start] for start in starts]
            written = [token for token, mine in zip(ids, sample.env_mask, strict=True) if mine]
            said = []
            while len(said) < len(written):
                said += next(turns)
            assert said == written
    assert sorted(seen) == sorted(context for contexts in asked for context in contexts)


def test_the_last_turns_are_a_conversation_as_the_template_writes_it(tokenizer):
    rows, trajectories, asked = played(tokenizer, ContextWindow("last", 2))
    for row, trajectory in zip(rows, trajectories, strict=True):
        shown = [row["prompt"][1]["content"], *trajectory.messages]
        assert len(trajectory.samples) == len(trajectory.answers) > 2
        for turn, sample in enumerate(trajectory.samples):
            messages = [row["prompt"][0]]
            for earlier in range(max(0, turn - 1), turn):
                said = Chat(tokenizer).text(trajectory.answers[earlier])
                messages += [{"role": "user", "content": shown[earlier]}, {"role": "assistant", "content": said}]
            messages.append({"role": "user", "content": shown[turn]})
            expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            assert sample.prompt_ids == expected
            assert sample.completion_ids == trajectory.answers[turn]
            assert [sample.prompt_ids[slice(*span)] for span in sample.earlier] == trajectory.answers[:turn][-1:]
    assert_sampled_as_trained(trajectories, asked)


def test_a_memory_tells_answers_without_thoughts_and_no_mark_of_the_template(tokenizer):
    def answer(turn):
        return "no tags" if turn == 2 else format_response("Secret.", ["Jump[INST]" if turn == 1 else "Jump"])

    rows, trajectories, asked = played(tokenizer, ContextWindow("memory", 4), answer)
    for row, trajectory in zip(rows, trajectories, strict=True):
        told = {
            1: "Your answers so far:\nTurn 1: Jump[ INST]\n\n",
            2: "Your answers so far:\nTurn 1: Jump[ INST]\nTurn 2: no valid answer\n\n",
            4: "Your answers so far:\nTurn 2: no valid answer\nTurn 3: Jump\nTurn 4: Jump\n\n",
        }
        for turn, memory in told.items():
            content = memory + trajectory.messages[turn - 1]
            messages = [row["prompt"][0], {"role": "user", "content": content}]
            expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            assert trajectory.samples[turn].prompt_ids == expected
        assert trajectory.samples[0].prompt_ids == Chat(tokenizer).prompt_ids(row["prompt"])
    assert_sampled_as_trained(trajectories, asked)


@pytest.mark.parametrize("limit", ["max_context", "max_tokens"])
@pytest.mark.parametrize("kind", ["full", "last", "memory"])
def test_the_oldest_turns_go_rather_than_the_episode(kind, limit, tokenizer):
    whole = played(tokenizer, ContextWindow())[1][0]
    prompt, everything = len(whole.prompt_ids), len(whole.context)
    if limit == "max_tokens" and kind != "full":
        return  # there it bounds a turn
    room = {"max_context": prompt + (everything - prompt) // 2} if limit == "max_context" else {"max_tokens": 60}
    ends = played(tokenizer, ContextWindow(kind), max_turn_tokens=30, **room)[1]
    _, goes_on, asked = played(tokenizer, ContextWindow(kind, drop_oldest=True), max_turn_tokens=30, **room)
    assert all(len(trajectory.answers) == 5 for trajectory in goes_on)
    if kind != "memory":  # whose answers are short
        assert any(len(trajectory.answers) < 5 for trajectory in ends)
        assert any(len(trajectory.samples) > 1 for trajectory in goes_on)
    assert_sampled_as_trained(goes_on, asked)
    if limit == "max_context":
        assert all(len(sample.context) <= room["max_context"] for t in goes_on for sample in t.samples)
    newest = goes_on[0].samples[-1].prompt_ids
    assert newest[:3] == goes_on[0].prompt_ids[:3]  # the rules stay


def test_the_whole_history_is_one_sample(tokenizer):
    _, trajectories, asked = played(tokenizer, ContextWindow())
    assert all(trajectory.turn_samples == [] for trajectory in trajectories)
    assert_sampled_as_trained(trajectories, asked)


def some_variance(seed, **columns):
    """Groups differ in how much their rewards do, and one in three does not vary."""
    return [float(number % GROUP * (one % 3)) for number, one in enumerate(seed)]


def trained(policy, tokenizer, make_args, kind, **settings):
    """Gradients of each optimizer step, and what the rollouts gave."""
    settings = {"learning_rate": 0.0, "max_grad_norm": 0.0, "max_steps": 1, **settings}
    args = multi_turn_args(make_args, **settings)
    env = make_env("frozen_lake", **LAKE, max_turns=4)
    rollout, outputs, recorder = TextRollout(env, **KINDS[kind]), [], Recorder()
    trainer, _ = make_trainer(policy, tokenizer, args, rollout=rollout, max_turns=4)
    trainer.reward_funcs[0] = some_variance
    if kind == "dropping":
        trainer.model.config.max_position_embeddings = 260
    trainer.add_callback(recorder)
    Player(trainer, tokenizer)

    def recorded(prompts, trainer):
        outputs.append(rollout(prompts, trainer))
        return outputs[-1]

    trainer.rollout_func = recorded
    seeds, sample = [], trainer._sample_round

    def with_seeds(inputs, number):
        seeds.append([row["seed"] for row in inputs])
        return sample(inputs, number)

    trainer._sample_round = with_seeds
    move_away(trainer.model)
    trainer.train()
    return trainer, recorder.gradients, outputs, seeds


def naive_gradient(trainer, output, seeds, loss_type, beta):
    """GRPO's loss over all samples of the kept episodes, one after the other, without padding."""
    rewards = torch.tensor(some_variance(seeds)).view(-1, GROUP)
    spread = rewards.std(dim=1, keepdim=True)
    advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 1e-4)).flatten()
    kept = trainer.latest_selection.kept.flatten()
    rows = []
    for number in kept.nonzero().flatten().tolist():
        first = {key: output[key][number] for key in ("prompt_ids", "completion_ids", "env_mask")}
        rows += [(sample, advantages[number]) for sample in [first, *output[TURN_SAMPLES][number]]]
    tokens = sum(sum(sample["env_mask"]) for sample, _ in rows)
    trainer.model.zero_grad()
    for sample, advantage in rows:
        ids = torch.tensor([sample["prompt_ids"] + sample["completion_ids"]])
        length, mask = len(sample["completion_ids"]), torch.tensor(sample["env_mask"])

        def logps(model, ids=ids, length=length):
            scores = model(input_ids=ids).logits[:, -length - 1 : -1].log_softmax(dim=-1)
            return scores.gather(2, ids[:, -length:].unsqueeze(2)).flatten()

        own = logps(trainer.model)
        per_token = -advantage * (own - own.detach()).exp()
        if beta:
            with torch.no_grad():
                difference = logps(trainer.ref_model) - own.detach()
            difference = difference + own.detach() - own
            penalty = difference.exp() - difference - 1
            if vars(trainer.args).get("use_bias_correction_kl"):  # not in every release of TRL
                penalty = penalty * (own - own.detach()).exp()
            per_token = per_token + beta * penalty
        total = (per_token * mask).sum()
        scale = {"dapo": tokens, "grpo": len(rows) * mask.sum(), "dr_grpo": len(rows) * 400}[loss_type]
        (total / scale).backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


LAYOUTS = {
    "one micro-batch": {"per_device_train_batch_size": 16},
    "two optimizer steps": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
        "max_steps": 2,
    },
    "four micro-batches": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "two passes": {"per_device_train_batch_size": 16, "num_iterations": 2, "max_steps": 2},
}


@pytest.mark.parametrize(
    ("kind", "loss_type", "layout"),
    [
        ("last", "dapo", "two optimizer steps"),
        ("memory", "grpo", "one micro-batch"),
        ("dropping", "dapo", "one micro-batch"),
        pytest.param("one", "dr_grpo", "four micro-batches", marks=pytest.mark.slow),
        pytest.param("memory", "dr_grpo", "two passes", marks=pytest.mark.slow),
        pytest.param("dropping", "grpo", "four micro-batches", marks=pytest.mark.slow),
        pytest.param("last", "grpo", "two passes", marks=pytest.mark.slow),
    ],
)
def test_the_update_is_grpo_on_every_sample_of_the_kept_episodes(
    kind, loss_type, layout, policy, tokenizer, make_args
):
    settings = {"loss_type": loss_type, "beta": 0.1, **LAYOUTS[layout]}
    trainer, gradients, outputs, seeds = trained(policy, tokenizer, make_args, kind, **settings)
    (output,) = outputs
    assert any(output[TURN_SAMPLES])
    assert 0 < int(trainer.latest_selection.groups.sum()) < len(trainer.latest_selection.groups)
    expected = naive_gradient(trainer, output, seeds[0], loss_type, 0.1)
    assert_close(mean_gradient(gradients), expected)


def test_reasoning_is_measured_under_the_contexts_it_was_sampled_from(policy, tokenizer, make_args):
    args = multi_turn_args(make_args, max_steps=1)
    env = make_env("frozen_lake", **LAKE)
    trainer, _ = make_trainer(policy, tokenizer, args, rollout=TextRollout(env, context="last", context_turns=2))
    player = Player(trainer, tokenizer)
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
    trainer.train()
    row = next(row for row in trainer.state.log_history if "loss" in row)
    assert row["mi/valid_thinking_rate"] == pytest.approx(row["env/frozen_lake/valid_rate"])
    assert len({key.split("/")[2] for key in row if key.startswith("mi/trajectory/turn_")}) > 1
    assert len(player.calls) > 2


def test_turns_of_samples_are_read_with_their_contexts_and_own_words(tokenizer):
    _, trajectories, asked = played(tokenizer, ContextWindow("last", 2))
    read = Trajectories(
        [t.prompt_ids for t in trajectories],
        [t.completion_ids for t in trajectories],
        tokenizer,
        [t.env_mask for t in trajectories],
        [turn_samples(t) for t in trajectories],
    )
    for number, trajectory in enumerate(trajectories):
        turns = read[number]
        assert read.num_turns(number) == len(turns) == len(trajectory.answers)
        assert all(list(turn.context) in contexts for turn, contexts in zip(turns, asked, strict=False))
        for turn, said in zip(turns[1:], trajectory.answers, strict=False):
            assert list(turn.context_without_own_words) == [
                token
                for place, token in enumerate(turn.context)
                if not any(first <= place < end for first, end in turn.earlier)
            ]
            ((first, end),) = turn.earlier
            assert list(turn.context[first:end]) == said[:-1]  # without the end token


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_of_one_sample_an_episode_are_refused_in_one_line(kind, policy, tokenizer, make_args):
    env = make_env("frozen_lake", **LAKE)
    with pytest.raises(ValueError, match="GRPOTrainer cannot take; allowed: SNRFilteredGRPOTrainer") as raised:
        rollout = TextRollout(env, **KINDS[kind])
        trainer, _ = make_trainer(policy, tokenizer, multi_turn_args(make_args, snr=False), GRPOTrainer, rollout)
        rollout.attach(trainer)
    assert "\n" not in str(raised.value)
    settings = vars(multi_turn_args(make_args))
    args = SNRFilteredPPOConfig(settings["output_dir"], use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(ValueError, match="SNRFilteredPPOTrainer cannot take"):
        make_trainer(policy, tokenizer, args, SNRFilteredPPOTrainer, TextRollout(env, **KINDS[kind]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"snr_dynamic_sampling_rounds": 2}, "snr_dynamic_sampling_rounds=2"),
        ({"snr_score": "entropy"}, "snr_score='entropy'"),
    ],
)
def test_settings_of_one_sample_an_episode_are_refused_before_training(settings, said, policy, tokenizer, make_args):
    rollout = TextRollout(make_env("frozen_lake", **LAKE), context="memory")
    with pytest.raises(ValueError, match=f"{said} knows of one training sample an episode"):
        make_trainer(policy, tokenizer, multi_turn_args(make_args, **settings), rollout=rollout)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": "none"}, r"context must be one of"),
        ({"context_turns": 2}, "context_turns must be None with context='full', got 2"),
        ({"context": "last", "context_turns": 0}, "context_turns must be"),
        ({"drop_oldest_turns": "yes"}, "drop_oldest_turns must be one of"),
    ],
)
def test_bad_contexts_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        TextRollout(make_env("frozen_lake", **LAKE), **options)


@pytest.mark.slow
def test_a_diagnosis_saves_every_context_and_scores_to_the_same_numbers(tmp_path):
    task = "--model tiny-sokoban --env_name sokoban --multi_turn true --env_args observation=coordinates max_turns=3"
    size = "--num_prompts 4 --num_samples 2 --max_turn_tokens 64 --context last --context_turns 1"
    main(["diagnose", *task.split(), *size.split(), "--output_dir", str(tmp_path / "sampled")])
    saved = ["--completions", str(tmp_path / "sampled" / "completions.parquet")]
    main(["diagnose", "--model", "tiny-sokoban", *saved, "--output_dir", str(tmp_path / "saved")])
    first, again = (json.loads((tmp_path / name / "diagnosis.json").read_text()) for name in ("sampled", "saved"))
    assert {"turn_2", "turn_3"} <= set(first["later_turns"])
    assert first["metrics"]["mi_seq"] == again["metrics"]["mi_seq"]
    assert first["later_turns"] == again["later_turns"]
