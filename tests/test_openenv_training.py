"""Training on tasks of an OpenEnv server."""

import json
import random

import pytest
from conftest import need

need("openenv")

from servers import NUM_TASKS, Running
from servers import run_server_fixture as run_server_fixture
from servers import text_server_fixture as text_server_fixture
from test_trl_fidelity import TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_template

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.openenv import Served
from ragen2_trl.rollouts import TextRollout


def walking(trainer, tokenizer):
    """Half of the completions walk by a tool call, each in another direction; the others write words."""
    generator, ways = random.Random(3), ["Left", "Down", "Right", "Up", "Fly"]

    def generate(prompt_ids, images, fields, num_generations, has_tool_images=False):
        completions = []
        for number in range(len(prompt_ids)):
            call = {"name": "move", "arguments": {"directions": generator.choices(ways, k=2)}}
            text = f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
            words = [*(generator.randrange(40, 140) for _ in range(5)), tokenizer.eos_token_id]
            completions.append(tokenizer(text)["input_ids"] if number % 2 else words)
        return completions, None

    trainer._generate_single_turn = generate


def train(policy_path, args, env, rows):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024),
        args=args,
        reward_funcs=env.success_func,
        train_dataset=rows,
        processing_class=tokenizer,
        environment_factory=env.environment_factory,
    )
    walking(trainer, tokenizer)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.fixture
def tool_args(make_args):
    return make_args(snr=False, max_completion_length=300, reward_weights=[0.0])


@pytest.mark.slow
def test_training_on_a_server_is_training_here(policy_path, tool_args, run_server):
    here = make_env("frozen_lake", multi_turn=True, protocol="tools")
    served = Served(run_server(here).url)
    rows = served.dataset(NUM_TASKS)
    logs = train(policy_path, tool_args, served, rows)
    same = train(policy_path, tool_args, here, here.dataset(NUM_TASKS).select(rows["seed"]))
    measured = [name for name in logs[0] if name.split("/")[0] in ("loss", "reward", "rewards", "env", "tools")]
    assert {"loss", "env/frozen_lake/return", "rewards/FrozenLakeTools/mean"} <= set(measured)
    assert [[row[name] for name in measured] for row in logs] == [[row[name] for name in measured] for row in same]
    assert len(logs) == 3
    for row in logs:
        assert row["tools/failure_frequency"] == 0
        assert row["tools/call_frequency"] > 0
        assert row["rewards/FrozenLakeTools/mean"] == pytest.approx(row["env/frozen_lake/return"])
    assert any(row["rewards/FrozenLakeTools/std"] > 0 for row in logs)


def test_training_stops_when_the_server_dies(policy_path, tool_args, monkeypatch):
    server = Running(make_env("frozen_lake", multi_turn=True, protocol="tools"))
    served = Served(server.url, timeout=5)
    take = served.tools._take

    def last_turn(tools, actions):
        if not server.server.should_exit:
            server.stop()
        return take(tools, actions)

    monkeypatch.setattr(served.tools, "_take", last_turn)
    with pytest.raises(ConnectionError, match=server.url):
        train(policy_path, tool_args, served, served.dataset(NUM_TASKS))


def test_a_text_rollout_plays_on_a_server(policy_path, make_args, text_server):
    served = Served(text_server.url)
    model = AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024)
    trainer = SNRFilteredGRPOTrainer(
        model,
        served.reward_funcs,
        make_args(max_completion_length=60, max_steps=2),
        served.dataset(NUM_TASKS),
        processing_class=AutoTokenizer.from_pretrained(policy_path),
        rollout_func=TextRollout(served, max_turn_tokens=8),
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert all(row["rewards/frozen_lake_return/mean"] < 0 for row in rows)
