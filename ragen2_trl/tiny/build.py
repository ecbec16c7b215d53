"""How the tiny model is made: a word-level tokenizer for our own prompts, and a small untrained Qwen3.

The trained weights come from these two functions and three warm starts, `make warm-start`: `model/` learns FrozenLake
from nothing; from there `model_sokoban/` goes on with Sokoban in several turns, and `model_countdown/` with Countdown.
"""

from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ragen2_trl.envs import make_env
from ragen2_trl.envs.frozen_lake import COLUMNS

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
# Ordinary tokens: TRL decodes with `skip_special_tokens=True`, and rewards need to see these.
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
ROLES = ("system", "user", "assistant")
# A word with the space before it, a single digit with the space before it, a run of punctuation, or one white space.
WORD_PATTERN = r" ?\p{L}+| ?\d| ?[^\s\p{L}\d]+|\s"
MAX_POSITIONS = 4096
# What the vocabulary is made of: any other text is spelled in bytes.
SAMPLES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("frozen_lake", {"observation": observation, "slip": slip, "multi_turn": multi_turn})
        for observation in ("grid", "coordinates", "both")
        for slip in (0.0, 0.1)
        for multi_turn in (False, True)
    ),
    *(
        ("sokoban", {"observation": observation, "boxes": boxes, "multi_turn": multi_turn})
        for observation in ("grid", "coordinates", "both")
        for boxes in (1, 2)
        for multi_turn in (False, True)
    ),
    ("countdown", {}),
]

# Generation markers tell what an assistant wrote, for training on the turns of a whole conversation.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the words of our prompts, with single bytes for whatever else there is.

    It is a BPE without merges: a word of the vocabulary is one token, any other is spelled in bytes, so that there is
    nothing it cannot encode and decoding gives the text back. Digits are always on their own.
    """
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words = {piece for text in _sample_texts() for piece, _ in splitter.pre_tokenize_str(text)}
    words.update(f"Ġ{digit}" for digit in range(10))  # Ġ is how byte-level tokenizers write a space
    words.update(f"Ġ{column}" for column in COLUMNS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *sorted(words - set(alphabet))])}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, START, END)])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )


def build_model(seed: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 for that tokenizer, in float32; the caller's random state is left alone.

    Not Qwen2: for that model type `AutoTokenizer` ignores the tokenizer of a folder and builds Qwen's own.
    """
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def _sample_texts() -> Iterator[str]:
    """Texts that together hold the words of our prompts and demonstrations."""
    yield from ROLES
    for name, options in SAMPLES:
        for row in make_env(name, **options).demonstrations(20, seed=0):
            for message in [*row["prompt"], *row["completion"]]:
                text = message["content"]
                for tag in TAGS:
                    text = text.replace(tag, "\n")
                yield text
