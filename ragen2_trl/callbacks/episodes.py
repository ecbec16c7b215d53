"""Episodes that a trainer plays are saved now and then, to be looked at, as JSONL beside its checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from ragen2_trl.callbacks.attached import check_own_trainer, is_newest
from ragen2_trl.callbacks.run_record import reported
from ragen2_trl.callbacks.trl_play import Referee, seed_of
from ragen2_trl.envs import Play
from ragen2_trl.envs.mixture import AnyTask
from ragen2_trl.envs.own_data import DatasetEnvironment
from ragen2_trl.record.files import EPISODES, TRAINING
from ragen2_trl.record.saved_episodes import PlayedEpisode, episodes_of, save_episodes
from ragen2_trl.rollout_events import LocalRollout, listen, refuse_asynchronous, sampling_events

# Its first micro-step, and the number of earlier generations of the same tasks there (under TRL's contracts: groups).
Generation = tuple[int, int]


class EpisodeCallback(TrainerCallback):
    """
    Saves the episodes of a training step now and then: messages, actions, rewards, validity, seeds and boards, as
    `train_<step>.jsonl` in `_episodes/` of `output_dir`, which no upload takes along.
    `ragen2-trl report` shows them. Training stays bit-identical.

    It sees what `TextRollout`, the reward functions of a task and its tools play, of one task or of several, on all
    processes; what is played for an evaluation is left out. Without reward functions of our environments, it saves the
    episodes of TRL's `environment_factory`, `tools`, `rollout_func` or single turns once they are scored: it
    leaves out groups that dynamic sampling adds to a step. Such an episode has one reward, and its actions are tool
    calls. [`EnvironmentEvalCallback`] says what counts as success.

    Args:
        trainer ([`~trl.GRPOTrainer`] or [`~trl.RLOOTrainer`], or a subclass):
            The trainer that the callback is then added to.
        every (`int`, *optional*, defaults to `10`):
            Minimum number of optimizer steps between two files. The first generation is always saved.
        max_episodes (`int`, *optional*, defaults to `256`):
            Maximum of a file: the first whole groups of the step.

    Raises:
        TypeError: For a trainer that does not sample completions.
        ValueError: If a number is below 1.
    """

    def __init__(self, trainer: Any, every: int = 10, max_episodes: int = 256):
        refuse_asynchronous(trainer, "EpisodeCallback")
        for name, value in (("every", every), ("max_episodes", max_episodes)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        self.trainer, self.every, self.max_episodes = trainer, every, max_episodes
        self._last: int | None = None  # step that was saved last
        # Of the step that is being saved, this process's part, by generation.
        self._generations: dict[Generation, list[PlayedEpisode]] = {}
        self._calls: list[tuple[int, set[str]]] = []  # of each so far, micro-step and tasks
        self._latest: Play | None = None
        # Rows of one's own are not played: their functions judge single turns, like any function.
        environments = [one for one in environments_of(trainer) if not isinstance(one, DatasetEnvironment)]
        for environment in environments:
            environment.on_played = self._keep
        if not environments:
            self._referee = Referee(sampling_events(trainer))
            listen(trainer, on_rollout=self._keep_rollout)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_own_trainer(self, self.trainer, state)
        self._last, self._generations, self._calls = None, {}, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes what this step has played; the last step that was asked for is the same on all processes."""
        if self._last != state.global_step:
            return
        parts = gather_object([self._generations])  # for each process its generations
        self._generations, self._calls, self._latest = {}, [], None
        if state.is_world_process_zero:
            with reported("Saving the episodes of this step"):
                episodes = whole_groups(in_groups(parts), self.max_episodes)
                save_episodes(Path(args.output_dir) / EPISODES, episodes, TRAINING, state.global_step)

    def _keep(
        self,
        prompts: Sequence[Sequence[Mapping[str, Any]]],
        seeds: Sequence[int],
        plays: Sequence[Play],
        completions: Sequence[Any] | None,
    ) -> None:
        step = self.trainer.state.global_step + 1
        if not self.trainer.model.training:
            return
        if not self._is_due(step) or not plays or plays[0] is self._latest:  # two reward functions ask for the same
            return
        self._latest = plays[0]
        played = episodes_of(prompts, seeds, plays, step, completions)
        self._generations.setdefault(self._generation(plays), []).extend(played)

    def _keep_rollout(self, local: LocalRollout) -> None:
        step, rows = self.trainer.state.global_step + 1, local.inputs
        if not is_newest(self, self.trainer) or not self._is_due(step):
            return
        first = self.trainer.accelerator.process_index * len(rows)
        seeds = [seed_of(row, 0) for row in rows]
        for place, episode in enumerate(self._referee.episodes(rows, seeds, step), first):
            if episode is None:
                continue
            # Rows may have no seed that tells groups apart.
            group = self.trainer._step, place // self.trainer.num_generations
            self._generations.setdefault(group, []).append(episode)

    def _is_due(self, step: int) -> bool:
        """Whether the episodes of a step are kept."""
        if self._last is None or step >= self._last + self.every:
            self._last = step
        return step == self._last

    def _generation(self, plays: Sequence[Play]) -> Generation:
        """The generation that plays are of. Each task may tell of its own, and not every process has one of each."""
        micro_step, tasks = self.trainer._step, {play.env.name for play in plays}
        told = sum(at == micro_step and not tasks.isdisjoint(others) for at, others in self._calls)
        self._calls.append((micro_step, tasks))
        return micro_step, told


def environments_of(trainer: Any) -> list[AnyTask]:
    """The tasks that a trainer's reward functions belong to, each once."""
    found = [getattr(func, "environment", None) for func in trainer.reward_funcs]
    distinct = {id(env): env for env in found if isinstance(env, AnyTask)}
    return list(distinct.values())


def in_groups(parts: Sequence[Mapping[Generation, Sequence[PlayedEpisode]]]) -> list[PlayedEpisode]:
    """The episodes of all processes, generation by generation, with their groups numbered over all of them.

    Args:
        parts: For each process, by generation, its episodes; a group may be spread over processes.
    """
    groups: dict[tuple[Generation, str, int], list[PlayedEpisode]] = {}
    for generation in sorted({generation for part in parts for generation in part}):
        for part in parts:
            for episode in part.get(generation, ()):
                groups.setdefault((generation, episode.task, episode.seed), []).append(episode)
    return [
        replace(episode, group=group, sample=sample)
        for group, members in enumerate(groups.values())
        for sample, episode in enumerate(members)
    ]


def whole_groups(episodes: Sequence[PlayedEpisode], limit: int) -> list[PlayedEpisode]:
    """The first groups that have at most `limit` episodes together, and the first in any case."""
    ends = [number + 1 for number, episode in enumerate(episodes) if _ends_group(episodes, number)]
    fitting = [end for end in ends if end <= limit]
    return list(episodes[: fitting[-1] if fitting else min(ends, default=0)])


def _ends_group(episodes: Sequence[PlayedEpisode], number: int) -> bool:
    return number + 1 == len(episodes) or episodes[number + 1].group != episodes[number].group
