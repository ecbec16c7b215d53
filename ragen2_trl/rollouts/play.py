"""Multi-turn play by a language model: the ids it sampled, what the environment answered, and which is which."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ragen2_trl.envs import Play, respond_all
from ragen2_trl.envs.mixture import AnyTask
from ragen2_trl.envs.play import check_failures
from ragen2_trl.messages import InputError
from ragen2_trl.rollouts.chat import Chat, Messages
from ragen2_trl.rollouts.context import FULL, ContextWindow, TrainingSample, Trajectory

# (contexts, most new tokens) -> for each context the ids it goes on with, and their log-probs where there are any
Generate: TypeAlias = Callable[[list[list[int]], int], tuple[list[list[int]], list[list[float]] | None]]


def play_all(
    plays: Sequence[Play],
    prompts: Sequence[Messages],
    chat: Chat,
    generate: Generate,
    *,
    max_tokens: int,
    max_turn_tokens: int | None = None,
    max_context: int | None = None,
    workers: int = 1,
    most: Callable[[int], int] = int,
    window: ContextWindow = FULL,
) -> list[Trajectory]:
    """Plays episodes to their end, all of those still running in one batch each turn.

    An episode ends by its rules, by its turns, or when nothing more fits into what turns are sampled from (see
    `ContextWindow`): then its last turn may be cut off, and counts as it stands.

    Args:
        plays: B episodes at their start.
        prompts: Their first messages.
        chat: Joins turns.
        generate: Continues contexts.
        max_tokens: Longest completion of a sample in tokens, all its turns and what the environment answers included.
        max_turn_tokens: Longest turn of the model; default: what is left.
        max_context: Longest prompt and completion together.
        workers: Episodes stepped at the same time.
        most: The largest of an int over all processes. Each of them generates until none has an episode left, since
            generation may need all of them.
        window: What a turn is sampled from; default: all turns so far.

    Returns:
        B trajectories; their plays are played, or have failed.

    Raises:
        ConnectionError: If too many episodes have failed.
        ValueError: If a prompt leaves no room for an answer.
    """
    trajectories = [
        Trajectory(play=play, prompt=prompt, prompt_ids=chat.prompt_ids(prompt))
        for play, prompt in zip(plays, prompts, strict=True)
    ]
    longest = max((len(trajectory.prompt_ids) for trajectory in trajectories), default=0)
    if max_context is not None and longest >= max_context:
        raise InputError(f"prompts must have fewer tokens than the model's {max_context} positions, got {longest}")

    def left(sample: TrainingSample) -> int:
        tokens = max_tokens - len(sample.completion_ids)
        return tokens if max_context is None else min(tokens, max_context - len(sample.context))

    def room(trajectory: Trajectory) -> int:
        tokens = left(trajectory.latest)
        return tokens if max_turn_tokens is None else min(tokens, max_turn_tokens)

    running = trajectories
    while limit := most(max((room(trajectory) for trajectory in running), default=0)):
        if not running:
            generate([trajectories[0].prompt_ids], limit)  # for the others' sake
            continue
        answers, logprobs = generate([trajectory.latest.context for trajectory in running], limit)
        for number, trajectory in enumerate(running):
            answers[number] = answers[number][: room(trajectory)]
            of_answer = None if logprobs is None else logprobs[number][: len(answers[number])]
            trajectory.latest.add(answers[number], by_model=True, logprobs=of_answer)
            trajectory.answers.append(answers[number])
        texts = [chat.text(answer) for answer in answers]
        messages = respond_all([trajectory.play for trajectory in running], texts, workers)
        check_failures(plays)
        played, running = running, []
        for trajectory, message in zip(played, messages, strict=True):
            if message is None:
                continue
            trajectory.messages.append(message)
            if window.goes_on(trajectory, chat, left(trajectory.latest), max_context, max_turn_tokens or 1):
                running.append(trajectory)
    return trajectories


def check_words_only(env: AnyTask) -> None:
    """Raises a `ValueError` unless the environment is played in text: with that protocol, and without pictures."""
    if env.protocol != "text" or env.shows_images:
        shown = "pictures" if env.shows_images else f"protocol={env.protocol!r}"
        raise ValueError(f"env must be text played with protocol='text', got {env.name} with {shown}")
