"""Trains on two processes, of which the first samples prompts with images and the second prompts without."""

import sys
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from ending import end

sys.path.insert(0, str(Path(__file__).parents[1]))

from backends import COMMON
from conftest import PROMPTS
from datasets import Dataset
from PIL import Image
from test_trl_fidelity import vision_model
from transformers import AutoTokenizer, Qwen3Config
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer

SETTINGS = {
    **{**COMMON, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_length": 6},
    # Without an image a vision tower has no gradients; and TRL gathers images on those processes only that have some.
    **{"ddp_backend": "gloo", "ddp_find_unused_parameters": True, "log_multimodal": False, "beta": 0.0},
}
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
EIGHT = {"image_size": 8, "patch_size": 4}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for b in m.content %}{{ '<image>' if b.type == 'image' else b.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def parts_of(policy_path, tokens):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer, Qwen3Config.from_pretrained(policy_path, vocab_size=len(tokenizer))


def ready(model, tokenizer):
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 8))
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def llava_next(policy_path):
    """Images of 3 or 5 tiles, padded to the most tiles of a call."""
    tokenizer, text = parts_of(policy_path, ["<image>"])
    pinpoints = [[8, 16], [16, 8], [16, 16]]
    tiles = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}, image_grid_pinpoints=pinpoints
    )
    processor = transformers.LlavaNextProcessor(
        tiles, tokenizer, 4, "default", TEMPLATE, num_additional_image_tokens=1
    )
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES, **EIGHT, projection_dim=16),
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
    )
    torch.manual_seed(7)
    return ready(transformers.LlavaNextForConditionalGeneration(config), tokenizer), processor


def idefics3(policy_path):
    """Rows of as many tiles as that of a call with the most, and a mask of those that are there."""
    places = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places]
    tokenizer, text = parts_of(policy_path, special)
    tiles = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 16}, max_image_size={"longest_edge": 8})
    processor = transformers.Idefics3Processor(tiles, tokenizer, image_seq_len=1, chat_template=TEMPLATE)
    config = transformers.Idefics3Config(
        vision_config=Idefics3VisionConfig(**SIZES, **EIGHT),
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    torch.manual_seed(7)
    return ready(transformers.Idefics3ForConditionalGeneration(config), tokenizer), processor


def llava(policy_path):
    model, processor = vision_model(policy_path)
    processor.chat_template = TEMPLATE
    return model, processor


def pictures(number):
    """None for every other prompt with variance, one or two of unequal shape for the rest."""
    shapes = [] if number in (0, 5) else [(8, 16), (16, 16)][: 1 + number % 2]
    return [Image.new("RGB", shape, (30 * number, 0, 99)) for shape in shapes]


def looking(numbers):
    prompts = [[{"role": "user", "content": PROMPTS[number]}] for number in numbers]
    return Dataset.from_dict({"prompt": prompts, "images": [pictures(number) for number in numbers]})


def varied(prompts, **kwargs):
    """0, 1, 0, 1 in the groups of each process but the last."""
    return [number % 2 * float(number < 4) for number in range(len(prompts))]


def main() -> None:
    policy_path, folder = sys.argv[1:]
    state = PartialState(cpu=True, backend="gloo")
    assert state.num_processes == 2
    seen = []
    for family in (llava, llava_next, idefics3):
        model, processor = family(policy_path)
        args = SNRFilteredGRPOConfig(output_dir=folder, **SETTINGS)
        trainer = SNRFilteredGRPOTrainer(model, varied, args, looking([1, 2, 0, 5]), processing_class=processor)
        sample, compute = trainer._sample_round, trainer._compute_loss
        sampled = []

        def sampling(inputs, number, sample=sample, sampled=sampled):
            sampled.append(sample(inputs, number))
            return sampled[-1]

        def computing(model, inputs, compute=compute):
            loss = compute(model, inputs)
            seen.append(bool(loss.isfinite()))
            return loss

        trainer._sample_round, trainer._compute_loss = sampling, computing
        trainer.train()
        assert all(("pixel_values" in batch) == (state.process_index == 0) for batch in sampled)
    torch.save(seen, Path(folder) / f"seen_{state.process_index}.pt")


if __name__ == "__main__":
    main()
    end()
