"""Held-out tasks played by a model behind an OpenAI-compatible endpoint: `ragen2-trl evaluate --model openai:NAME`.

Address and key come from `OPENAI_BASE_URL` and `OPENAI_API_KEY`, as OpenAI's own package reads them, and are shown and
written nowhere. What the endpoint answers is a stranger's text.
"""

import asyncio
import json
import logging
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from datasets import Dataset

from ragen2_trl.cli.arguments import EvaluateArguments
from ragen2_trl.cli.typed import InputError, checked_input
from ragen2_trl.envs import Environment, Play, completion_text
from ragen2_trl.redaction import HIDDEN, hide_credentials
from ragen2_trl.reporting.examples import printable
from ragen2_trl.rollouts.play import check_words_only
from ragen2_trl.rollouts.sampling import held_out_plays

PREFIX = "openai:"
OPENAI_URL = "https://api.openai.com/v1"
NO_KEY = "none"  # what servers of one's own are sent, which ask for nothing
TURN_TOKENS = 1024  # of a turn, unless another limit is given
RETRIES = 4  # after lost connections, time-outs, 408, 409, 429 and 5xx; waits are OpenAI's, up to 8 s or as it is told
MAX_ANSWER_BYTES = 4_000_000
OTHER_LIMIT = "max_completion_tokens"  # what OpenAI's newest models call `max_tokens`, which all others know
LOGGERS = ("openai", "httpx", "httpx2", "httpcore", "httpcore2")
MAX_SAID_CHARS = 200  # of what an endpoint says of a request that it refuses


class EndpointError(InputError):
    """The endpoint cannot be reached, refuses, or answers something else: said in one line."""


@dataclass(frozen=True)
class Endpoint:
    """Where a model is, and how it is asked.

    Args:
        model: Its name there.
        url: The base of its address, without a user, a query or a fragment.
        key: The secret; never shown.
        temperature: Of the sampling.
        max_turn_tokens: Longest answer.
        timeout: Seconds that an answer may take, 1 to 3600.
        concurrency: Episodes that are played at once, 1 to 1024.
        extra: Further fields of the request, such as `chat_template_kwargs`.

    Raises:
        ValueError: If an argument is outside its range, without the value of one that is secret.
    """

    model: str
    url: str
    key: str
    temperature: float = 1.0
    max_turn_tokens: int = TURN_TOKENS
    timeout: float = 120.0
    concurrency: int = 8
    extra: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ValueError(f"model must name one of the endpoint's, {PREFIX}NAME, got {PREFIX + self.model!r}")
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("OPENAI_BASE_URL must be http://host/v1 or https://host/v1, got another form")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("OPENAI_BASE_URL must be an address alone; the key belongs into OPENAI_API_KEY")
        if not re.fullmatch(r"[!-~]+", self.key):  # what a header can hold
            raise ValueError("OPENAI_API_KEY must be printable ASCII without spaces, got another form")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature!r}")
        for name, most in (("max_turn_tokens", 10**6), ("timeout", 3600), ("concurrency", 1024)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be between 1 and {most}, got {getattr(self, name)!r}")

    def __repr__(self) -> str:
        return f"Endpoint(model={self.model!r})"


def endpoint_of(arguments: EvaluateArguments) -> Endpoint:
    """The endpoint of `--model openai:NAME`.

    Raises:
        ValueError: If the environment's variables or the arguments are not those of an endpoint.
    """
    url = (os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).strip()
    key = (os.environ.get("OPENAI_API_KEY") or "").strip()
    if not key and url == OPENAI_URL:
        raise ValueError("OPENAI_API_KEY must be set, or OPENAI_BASE_URL where a server of your own asks for no key")
    if arguments.max_new_tokens is not None:
        raise ValueError(
            f"max_new_tokens must be None with {PREFIX}NAME, whose turns max_turn_tokens bounds, got "
            f"{arguments.max_new_tokens!r}"
        )
    whole = {"context": "full", "context_turns": None, "drop_oldest_turns": False}
    for name, value in arguments.context_options.items():
        if value != whole[name]:
            raise ValueError(
                f"{name} must be {whole[name]!r} with {PREFIX}NAME, which is sent all turns, got {value!r}"
            )
    given = arguments.chat_template_kwargs
    return Endpoint(
        arguments.model.removeprefix(PREFIX),
        url,
        key or NO_KEY,
        arguments.temperature,
        TURN_TOKENS if arguments.max_turn_tokens is None else arguments.max_turn_tokens,
        arguments.timeout,
        arguments.concurrency,
        {"chat_template_kwargs": given} if given else None,  # as vLLM and SGLang take them
    )


def play_endpoint(
    endpoint: Endpoint,
    env: Environment,
    *,
    num_prompts: int,
    num_samples: int,
    seed: int,
    data: str | None,
    on_finished: Callable[[Dataset, list[Play], int], None],
) -> list[Play]:
    """Plays held-out tasks, `endpoint.concurrency` episodes at a time.

    Args:
        endpoint: The model.
        env: The task, played in text.
        num_prompts, num_samples, seed, data: As in `evaluate_model`.
        on_finished: Called with (rows, plays, finished) whenever an episode has come to its end; the other plays are
            where they are.

    Returns:
        The plays, all of them at their end.

    Raises:
        EndpointError: At the first answer that cannot be had; no other request is waited for.
        InputError: If an argument is outside its range.
    """
    with checked_input():
        check_words_only(env)
        rows, plays = held_out_plays(env, num_prompts, num_samples, seed, data)
    with _silence():
        asyncio.run(_play_all(endpoint, env, rows, plays, lambda finished: on_finished(rows, plays, finished)))
    return plays


@contextmanager
def _silence() -> Iterator[None]:
    """Libraries that would log addresses and headers do not, for a while."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


async def _play_all(
    endpoint: Endpoint, env: Environment, rows: Dataset, plays: Sequence[Play], tell: Callable[[int], None]
) -> None:
    stepping, finished = asyncio.Semaphore(env.workers), 0
    waiting = zip(plays, rows["prompt"][:], strict=True)

    async def play_some(client: "_Client") -> None:
        nonlocal finished
        for play, prompt in waiting:  # of all players: each takes the next that nobody has
            messages = [dict(message) for message in prompt]
            while not play.done:
                text = await client.answer(messages)
                async with stepping:  # steps may wait for programs or searches
                    reply = await asyncio.to_thread(play.respond, text)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]
            finished += 1
            tell(finished)

    async with _Client(endpoint) as client:
        players = [asyncio.ensure_future(play_some(client)) for _ in range(min(endpoint.concurrency, len(plays)))]
        try:
            await asyncio.gather(*players)
        finally:  # nobody waits for the others of one that has failed
            for player in players:
                player.cancel()
            await asyncio.gather(*players, return_exceptions=True)


class _Client:
    """Asks for one answer after the other; its errors are `EndpointError`s of one line."""

    def __init__(self, endpoint: Endpoint):
        try:
            import openai  # an extra
        except ImportError:
            raise EndpointError(
                f"model={PREFIX + endpoint.model!r} needs OpenAI's package: pip install 'ragen2-trl[openai]'"
            ) from None
        self._openai, self._endpoint = openai, endpoint
        self._client = openai.AsyncOpenAI(
            base_url=endpoint.url, api_key=endpoint.key, timeout=endpoint.timeout, max_retries=RETRIES
        )
        # Retries and the waits before them included: an answer that drips never meets the time-out of a read.
        self._longest = (RETRIES + 1) * (endpoint.timeout + 10)
        self._limit = "max_tokens"

    async def __aenter__(self) -> "_Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def answer(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What the model says to a conversation; reasoning that the server has taken out is put back."""
        for tries in range(1, RETRIES + 2):
            limit = self._limit
            try:
                return self._content(await asyncio.wait_for(self._ask(messages), self._longest))
            except EndpointError:
                raise
            except (asyncio.TimeoutError, self._openai.APITimeoutError):
                raise self._error(
                    f"gave no answer within {self._endpoint.timeout:g} s in {RETRIES + 1} tries"
                ) from None
            except self._openai.APIStatusError as error:
                if limit != "max_tokens" or error.status_code != 400 or OTHER_LIMIT not in str(error):
                    raise self._error(f"refused with status {error.status_code}{self._said(error)}") from None
                self._limit = OTHER_LIMIT
            except self._openai.APIConnectionError as error:
                reason = type(error.__cause__ or error).__name__
                raise self._error(f"cannot be reached in {RETRIES + 1} tries: {reason}") from None
            except Exception as error:  # noqa: BLE001 - of whichever HTTP library, while the answer is read
                if tries > RETRIES:
                    raise self._error(f"broke off its answer in {tries} tries: {type(error).__name__}") from None
                await asyncio.sleep(min(8.0, 0.5 * 2**tries))
        raise self._error("wants another limit of tokens than it says")

    async def _ask(self, messages: Sequence[Mapping[str, Any]]) -> bytes:
        endpoint = self._endpoint
        ask = self._client.chat.completions.with_streaming_response.create(
            model=endpoint.model,
            messages=cast(Any, list(messages)),
            temperature=endpoint.temperature,
            extra_body={self._limit: endpoint.max_turn_tokens, **(endpoint.extra or {})},
        )
        body = bytearray()
        async with ask as response:
            async for piece in response.iter_bytes():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise self._error(f"answered with more than {MAX_ANSWER_BYTES:,} bytes")
        return bytes(body)

    def _content(self, body: bytes) -> str:
        try:
            message = json.loads(body)["choices"][0]["message"]
            text = completion_text([{**message, "role": "assistant"}])
            if message.get("content") is None and not text:
                raise ValueError("content is null")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            form = "choices[0].message.content with a text"
            raise self._error(f"answered in another form than {form}: {type(error).__name__}") from None
        return text.encode("utf-8", "replace").decode()  # halves of surrogate pairs could not be sent back

    def _said(self, error: Any) -> str:
        """What the endpoint says of a request, in one line; nothing where it may be about the key."""
        if error.status_code in (401, 403):
            return ": look at OPENAI_API_KEY"
        text = str(error.message)
        for secret in (self._endpoint.key, self._endpoint.url, urllib.parse.urlsplit(self._endpoint.url).netloc):
            text = text.replace(secret, HIDDEN)
        text = " ".join(text.split())
        return f": {hide_credentials(printable(text))[:MAX_SAID_CHARS]}" if text else ""

    def _error(self, what: str) -> EndpointError:
        return EndpointError(f"the endpoint of OPENAI_BASE_URL {what}")
