"""How a chat template joins turns, in ids."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ragen2_trl.messages import InputError

Messages: TypeAlias = Sequence[Mapping[str, Any]]

_MARK = "ragen2-trl:answer"  # stands for the model's answer while a template is read


class Chat:
    """How a chat template joins turns, in ids.

    Args:
        tokenizer: Turns text into ids and back.
        eos_token_ids: Ids that end a turn; default: the tokenizer's own.
        processor: What has the chat template: the tokenizer by default, or the processor of a vision-language model.
        forced_tag: What the prompt of each turn ends with, such as `<think>`, unless the template ends with it itself.
        **template_kwargs: For the template, for instance `enable_thinking` or a `chat_template` of its own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int] | None = None,
        processor: Any = None,
        forced_tag: str = "",
        **template_kwargs: Any,
    ):
        self._tokenizer = tokenizer
        self._processor: Any = processor or tokenizer
        self._eos = {tokenizer.eos_token_id} if eos_token_ids is None else set(eos_token_ids)
        self._forced_tag = forced_tag
        self._kwargs = template_kwargs

    def prompt_ids(self, messages: Messages | str) -> list[int]:
        """Ids of a conversation, up to where the model's next turn begins; of a text as they are, as in TRL."""
        if isinstance(messages, str):
            return self._tokenizer(messages)["input_ids"]
        text = self._render(messages)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def reply_ids(self, answer_ids: Sequence[int], message: str) -> list[int]:
        """Ids between an answer of the model and its next turn: the end of its turn and the user's message.

        The answer itself is not tokenised again: the ids that were sampled are the ids that are trained.
        """
        conversation = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": message},
        ]
        _, _, text = self._render(conversation).partition(_MARK)
        end_of_turn, _, _ = text.partition(message)
        closing = self._tokenizer(end_of_turn, add_special_tokens=False)["input_ids"]
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        last = answer_ids[-1] if answer_ids else None
        # Where the model has ended its turn itself, what the template ends it with is there already.
        return ids[closing.index(last) + 1 :] if last in self._eos and last in closing else ids

    def text(self, ids: Sequence[int]) -> str:
        """What an answer says."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _render(self, messages: Messages) -> str:
        if self._processor is not self._tokenizer:  # some templates of vision-language models read parts only
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        try:
            text: str = self._processor.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False, **self._kwargs
            )
        except (TemplateError, ValueError) as error:
            if self._processor.chat_template is None:
                raise InputError("tokenizer must have a chat_template for messages or turns, got None") from error
            raise InputError(f"prompt does not fit the model's chat template: {error}") from error
        return text if text.rstrip().endswith(self._forced_tag) else text + self._forced_tag
