"""FrozenLake and Sokoban as pictures, played by a vision-language model in TRL: in one turn, and through tools."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from trl.chat_template_utils import qwen3_vl_chat_template
from trl.trainer import grpo_trainer

from ragen2_trl import EpisodeCallback, SNRFilteredGRPOTrainer
from ragen2_trl.cli.shipped import recipe_path
from ragen2_trl.cli.train import main as train
from ragen2_trl.envs import make_env
from ragen2_trl.record.saved_episodes import PICTURE, read_episodes

VISION = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION.values()]
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


class Processor(Qwen3VLProcessor):
    """Without a processor of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, name, argument):
        return type(argument)


class NoVideos:
    model_input_names = ("pixel_values_videos",)
    merge_size = 2


@pytest.fixture(scope="module")
def processor():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters.decoder = decoders.ByteLevel()
    letters.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    letters.add_tokens([AddedToken(token, special=False) for token in TAGS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    for name, token in VISION.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    images = Qwen2VLImageProcessor(patch_size=16, merge_size=2, min_pixels=64 * 64, max_pixels=192 * 192)
    return Processor(
        image_processor=images, tokenizer=tokenizer, video_processor=NoVideos(), chat_template=qwen3_vl_chat_template
    )


@pytest.fixture(scope="module")
def model(processor):
    size = {"hidden_size": 32, "intermediate_size": 64}
    config = Qwen3VLConfig(
        text_config={
            **size,
            "vocab_size": len(processor.tokenizer),
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        vision_config={
            **size,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 16,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 144,
        },
        tie_word_embeddings=True,
        **{f"{name}_id": getattr(processor.tokenizer, f"{name}_id") for name in VISION},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3VLForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("protocol", "name"),
    [
        ("text", "frozen_lake"),
        ("text", "sokoban"),
        pytest.param("tools", "frozen_lake", marks=pytest.mark.slow),  # half a minute
        pytest.param("tools", "sokoban", marks=pytest.mark.full),
    ],
)
def test_a_vision_language_model_plays_what_it_sees(name, protocol, model, processor, make_args):
    env = make_env(name, observation="image", protocol=protocol)
    args = make_args(
        per_device_train_batch_size=8,
        max_completion_length=900 if protocol == "tools" else 120,
        max_steps=1,
        reward_weights=[0.0] if protocol == "tools" else None,
    )
    tools = {"environment_factory": env.environment_factory} if protocol == "tools" else {}
    trainer = SNRFilteredGRPOTrainer(
        model,
        [env.success_func] if protocol == "tools" else env.reward_funcs,
        args,
        env.dataset(4, seed=0),
        processing_class=processor,
        **tools,
    )
    directions, shown, generate = itertools.cycle(["Up", "Down", "Left", "Jump"]), [], trainer._generate_single_turn

    def reading(prompt_ids, images, *arguments, **keywords):
        generate(prompt_ids, images, *arguments, **keywords)  # the model must be able to read all of it
        shown.append([len(of_row) for of_row in images])
        answers = [next(directions) for _ in prompt_ids]
        if protocol == "tools":
            call = '<tool_call>\n{{"name": "move", "arguments": {{"directions": ["{}"]}}}}\n</tool_call><|im_end|>'
            texts = [call.format(answer) for answer in answers]
        else:
            texts = [f"<think>a</think><answer>Up || {answer}</answer><|im_end|>" for answer in answers]
        return [processor.tokenizer(text)["input_ids"] for text in texts], None

    trainer._generate_single_turn = reading
    trainer.add_callback(EpisodeCallback(trainer))
    trainer.train()
    for one in read_episodes(Path(args.output_dir) / "_episodes" / "train_00001.jsonl"):
        calls = [message for message in one.messages if "tool_calls" in message]
        assert len(one.boards) == len(one.turns) + 1
        assert len(calls) >= len(one.turns) if protocol == "tools" else not calls  # some are answered "over"
        assert any(PICTURE in message["content"] for message in one.messages)
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    assert 0 < row[f"env/{name}/valid_rate"] < 1
    assert shown[0] == [1] * 8
    if protocol == "tools":  # a further picture with every turn, for those who still play
        assert [max(counts) for counts in shown] == [min(turn + 1, env.max_turns) for turn in range(len(shown))]
        assert row[f"env/{name}/turns"] > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_the_recipe_of_pictures_trains_with_the_model_cut_down(name, model, processor, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(grpo_trainer.AutoProcessor, "from_pretrained", lambda *args, **kwargs: processor)
    monkeypatch.setattr(processor, "save_pretrained", lambda folder, **kwargs: None)  # its videos cannot be
    recipe = recipe_path(f"ragen2/{name}_vl")
    settings = yaml.safe_load(recipe.read_text())
    rows = {"generation_batch_size": 8, "num_generations": 4, "per_device_train_batch_size": 4, "num_prompts": 8}
    settings |= {**rows, "gradient_accumulation_steps": 1, "max_steps": 2, "max_completion_length": 16}
    settings |= {"use_cpu": True, "bf16": False, "dtype": "float32", "save_strategy": "no", "snr_strategy": "all"}
    settings |= {"model": str(tmp_path / "model"), "output_dir": str(tmp_path / "run")}
    (tmp_path / "cut.yaml").write_text(yaml.safe_dump(settings))
    train(["--config", str(tmp_path / "cut.yaml")])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
