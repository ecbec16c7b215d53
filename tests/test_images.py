"""Vision-language models whose prompts have two images, one or none, through real training runs."""

from itertools import count

import pytest
import torch
import transformers
from conftest import PROMPTS
from datasets import Dataset
from fidelity import REFILL, VARIED, row_of, run
from launching import launch
from PIL import Image
from test_trl_batches import vision_model
from transformers import AutoTokenizer, Qwen3Config
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
EIGHT = {"image_size": 8, "patch_size": 4}
LAYOUTS = (
    {"per_device_train_batch_size": 16},
    # Nothing carried over: that needs log-probs of the whole batch, which TRL computes two rows at a time.
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
)
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


def tiles_of(pixels):
    """All images or tiles that are not padding, in their order."""
    tiles = pixels.flatten(0, -4)
    return tiles[tiles.flatten(1).any(dim=1)]


def accepting_rows_without(processor):
    """TRL says `None` for a row without images, and the processors want an empty list."""

    class Accepting(type(processor)):
        def __call__(self, images=None, **kwargs):
            return super().__call__(images=images and [image or [] for image in images], **kwargs)

    processor.__class__ = Accepting


def in_every_other_round(trainer):
    rounds, sample = count(), trainer._sample_round
    trainer._sample_round = lambda inputs, number: sample(
        [{**row, "images": pictures(1) if turn % 2 else []} for turn in [next(rounds)] for row in inputs], number
    )


@pytest.mark.parametrize("mixed", ["rows", "rounds"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", [llava, llava_next, idefics3], ids=lambda family: family.__name__)
def test_prompts_with_and_without_images_train_together(family, layout, mixed, policy_path, make_args):
    """In one batch, which TRL can do given such a processor, or each in a round of dynamic sampling of its own."""
    model, processor = family(policy_path)
    prepare = in_every_other_round if mixed == "rounds" else None
    if mixed == "rows":
        accepting_rows_without(processor)
    args = make_args(max_steps=4, **layout, **REFILL)
    trainer = run(model, args, looking(range(8)), prepare=prepare, processing_class=processor)
    image_token = trainer._tokenizer.convert_tokens_to_ids("<image>")
    kinds = []
    for batch in trainer.seen:
        texts = trainer._tokenizer.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
        rows = [row_of(text) for text in texts]
        assert set(rows) <= set(VARIED) or batch.get("snr_weight") == 0
        has_image = (batch["prompt_ids"] == image_token).any(dim=1).tolist()
        images = [pictures(row if mixed == "rows" else 1) for row, has in zip(rows, has_image, strict=True) if has]
        assert ("pixel_values" in batch) == any(has_image)
        if images:
            expected = processor.image_processor(images, return_tensors="pt")["pixel_values"]
            assert torch.equal(tiles_of(batch["pixel_values"]), tiles_of(expected))
        kinds += has_image
    assert set(kinds) == {True, False}


@pytest.mark.slow
def test_a_process_with_images_trains_beside_one_without(policy_path, tmp_path):
    launch("images.py", 2, policy_path, tmp_path)
    for process in range(2):
        steps = torch.load(tmp_path / f"seen_{process}.pt")
        assert len(steps) == 6  # three families, two steps
        assert all(steps)
