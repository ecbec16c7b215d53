"""Our tasks as TRL's `environment_factory`: the trainer's own tool loop plays them by the same rules."""

import json
import random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_template

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What the four members of each group do, turn by turn; then they stop calling tools.
PLANS = ([["Up"], ["Right", "Down"]], [["Jump"]], [], [["Down", "Down"], ["Right", "Right"], ["Up"]])


@pytest.mark.parametrize("kind", [SNRFilteredGRPOTrainer, GRPOTrainer])
def test_the_tool_loop_gives_the_returns_of_the_rules(kind, policy_path, make_args):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    model = AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024)
    env = make_env("frozen_lake", multi_turn=True, size=3, protocol="tools")
    args = make_args(
        snr=kind is SNRFilteredGRPOTrainer,
        per_device_train_batch_size=16,
        max_completion_length=700,
        max_steps=1,
        reward_weights=[0.0],  # of the success; the environment's own reward has weight 1
    )
    trainer = kind(
        model,
        [env.success_func],
        args,
        env.dataset(8, seed=0),
        processing_class=tokenizer,
        environment_factory=env.environment_factory,
    )
    call = '<tool_call>\n{{"name": "move", "arguments": {{"directions": {}}}}}\n</tool_call><|im_end|>'

    def generate(contexts, images, fields, num_generations, has_tool_images=False):
        texts = [tokenizer.decode(context) for context in contexts]
        answers = []
        for number, text in enumerate(texts):
            if num_generations > 1:
                plan = PLANS[number % 4]
            else:
                plan = next(plan for plan in PLANS if plan and json.dumps(plan[0]) in text)
            turn = text.count("<tool_call>")
            words = call.format(json.dumps(plan[turn])) if turn < len(plan) else "Enough<|im_end|>"
            answers.append(tokenizer(words)["input_ids"])
        return answers, None

    trainer._generate_single_turn = generate
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    outcomes = [environment._play.outcome for environment in trainer.environments]
    for row_of, outcome, number in zip(trainer.environments, outcomes, range(16), strict=True):
        played = env.play({"seed": 0, "grid": "\n".join(row_of._play.episode.grid)}, random.Random(0))
        for actions in PLANS[number % 4]:
            if not played.done:
                played.take(actions)
        assert outcome == played.outcome
    assert row["reward"] == pytest.approx(sum(outcome.episode_return for outcome in outcomes) / 16)
    assert row["rewards/FrozenLakeTools/mean"] == row["reward"]
    assert row["env/frozen_lake/success"] == row["rewards/frozen_lake_success/mean"]
    assert row["env/frozen_lake/turns"] == pytest.approx(sum(outcome.turns for outcome in outcomes) / 16)
    assert row["env/frozen_lake/valid_rate"] < 1
    assert row["tools/failure_frequency"] == 0
