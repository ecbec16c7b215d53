"""Models of each family see the same images whatever rows they were sampled with."""

import pytest
import torch
import transformers
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
from trl.trainer.utils import (
    pad,
)

from ragen2_trl.trainers.batches import join, take

PAD = 0

TEXT_MODEL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
VISION_MODEL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
IMAGE_TOKEN = 99


def llava_next():
    vision = transformers.CLIPVisionConfig(**VISION_MODEL, projection_dim=16)
    config = transformers.LlavaNextConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT_MODEL),
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=[[8, 16], [16, 8], [16, 16]],
        vision_feature_layer=-1,
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def idefics3():
    vision, text = Idefics3VisionConfig(**VISION_MODEL), transformers.LlamaConfig(**TEXT_MODEL)
    config = transformers.Idefics3Config(
        vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, scale_factor=2
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def smolvlm():
    vision, text = SmolVLMVisionConfig(**VISION_MODEL), transformers.LlamaConfig(**TEXT_MODEL)
    config = transformers.SmolVLMConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, scale_factor=2
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def tiled(family, sizes):
    """A batch of the processor's call for a row whose images have the given heights and widths."""
    generator = torch.Generator().manual_seed(sum(map(sum, sizes)))
    tiles = [1 + (height // 8) * (width // 8) for height, width in sizes]
    pictures = torch.randn(sum(tiles), 3, 8, 8, generator=generator)
    if not sizes:
        return {}, 0
    if family == "llava_next":
        pixels = pad(list(pictures.split(tiles)))
        model = llava_next().eval()
        features = model.get_image_features(pixels, torch.tensor(sizes), vision_feature_select_strategy="default")
        tokens = sum(map(len, features.pooler_output))
        return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes), "num_images": [len(sizes)]}, tokens
    mask = torch.ones(1, sum(tiles), 8, 8, dtype=torch.long)
    return {"pixel_values": pictures[None], "pixel_attention_mask": mask, "num_images": [len(sizes)]}, sum(tiles)


def logits_of(model, batch):
    """Of the tokens of each row, shown what TRL shows a model."""
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    shown = {key: batch[key] for key in ("pixel_values", "pixel_attention_mask", "image_sizes") if key in batch}
    with torch.no_grad():
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, **shown).logits
    return [row[real.bool()] for row, real in zip(logits, mask, strict=True)]


@pytest.mark.parametrize("family", [llava_next, idefics3, smolvlm], ids=lambda family: family.__name__)
def test_models_see_the_same_images_whatever_they_were_sampled_with(family):
    """Rows of calls with 3 to 8 tiles, and one of text, all together, in twos and alone."""
    torch.manual_seed(1)
    model = family().eval()
    batches = []
    for number, sizes in enumerate([[(8, 16)], [(16, 16), (16, 8)], [], [(16, 8)]]):
        images, tokens = tiled(family.__name__, sizes)
        prompt = torch.tensor([[5 + number] * (number + 1) + [IMAGE_TOKEN] * tokens])
        completion = torch.tensor([[20 + number, 30 + number]])
        masks = {"prompt_mask": torch.ones_like(prompt), "completion_mask": torch.ones_like(completion)}
        batches.append({"prompt_ids": prompt, "completion_ids": completion, **masks, **images})
    alone = [logits_of(model, batch)[0] for batch in batches]
    joined = join(batches, PAD)
    for rows in ([0, 1, 2, 3], [3, 2], [1, 0], [2], [2, 2], [0]):
        for row, logits in zip(rows, logits_of(model, take(joined, rows)), strict=True):
            torch.testing.assert_close(logits, alone[row], rtol=1e-4, atol=1e-5)
