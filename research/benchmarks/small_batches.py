"""Whether generations of one, two and four prompts keep the groups that a large batch would keep.

    python benchmarks/small_batches.py    # about a quarter of an hour on two cores

The tiny model trains on FrozenLake with one, two and four prompts a step, 8 completions each, for 256 groups in all,
with the filter's defaults. After every 16 groups, 64 other prompts are sampled with the weights of that moment. Each
of the second 32 is then asked about four times: would it be kept

1. in a batch with the first 32 (what counts as right),
2. in a batch with the other 31 of the second 32 (how far two large batches agree: what there is to reach),
3. in a generation of the run, among its latest groups (`snr_window`, of several sizes),
4. in a generation by itself (`snr_window=None`).

Timed is the update, as in `filter_step_time.py`, against plain TRL with the same number of prompts. Once more, the
same is asked with all rewards of the second half of each run a tenth of what they were. One seed unless `--seeds` says
more. Writes `benchmarks/results/small_batches.{json,md}`.
"""

import argparse
import json
import statistics
import tempfile
from copy import deepcopy
from pathlib import Path

import torch
import transformers
from filter_step_time import StepTimes
from measuring import machine
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.filtering import group_score
from ragen2_trl.rollouts.sampling import sample_trajectories
from ragen2_trl.tiny import TINY_MODEL_PATH
from ragen2_trl.trainers.selecting import Selector

RESULTS = Path(__file__).parent / "results"
GROUP_SIZE, LARGE = 8, 32
GROUPS, EVERY = 256, 16
PROMPTS_A_STEP = (1, 2, 4)
WINDOWS = (64, 128, 256)


class Probes(TrainerCallback):
    """The rewards of a run's groups, and of other prompts under the weights of the moment."""

    def __init__(self, env):
        self.env, self.stream, self.probes = env, [], []

    def watch(self, trainer):
        self.trainer = trainer
        begin = trainer._begin_run

        def begin_and_watch():
            begin()
            select = trainer._selector.select

            def selected(rewards, scores):
                self.stream.append(rewards.cpu())
                return select(rewards, scores)

            trainer._selector.select = selected

        trainer._begin_run = begin_and_watch

    def on_step_end(self, args, state, control, **kwargs):
        groups = sum(len(rewards) for rewards in self.stream)
        if groups % EVERY == 0:
            _, trajectories = sample_trajectories(
                self.trainer.model,
                self.trainer.processing_class,
                self.env,
                num_prompts=2 * LARGE,
                num_samples=GROUP_SIZE,
                temperature=1.0,
                max_new_tokens=64,
                batch_size=2 * LARGE * GROUP_SIZE,
                seed=groups,
            )
            returns = [trajectory.play.outcome.episode_return for trajectory in trajectories]
            self.probes.append((len(self.stream), torch.tensor(returns).view(-1, GROUP_SIZE)))


def arguments(config, groups: int, steps: int, seed: int, **settings):
    return config(
        tempfile.mkdtemp(),
        per_device_train_batch_size=groups * GROUP_SIZE,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        max_completion_length=64,
        learning_rate=3e-5,
        lr_scheduler_type="constant",
        max_steps=steps,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=seed,
        **settings,
    )


def train(trainer_class, args, env, seed, probes=None) -> float:
    """Mean seconds of an update."""
    times = StepTimes()
    callbacks = [times] if probes is None else [times, probes]
    dataset = env.dataset(1024, seed=seed)
    trainer = trainer_class(str(TINY_MODEL_PATH), env.reward_funcs, args, dataset, callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    times.watch(trainer)
    if probes is not None:
        probes.watch(trainer)
    trainer.train()
    return statistics.mean(times.updates[2:])


def kept_of(selector: Selector, rewards: torch.Tensor) -> list[bool]:
    return selector.select(rewards, group_score(rewards)).kept.tolist()


def decisions(stream, probes, groups: int) -> list[dict]:
    """For each probe of each moment, what each way of asking answers."""
    large = arguments(SNRFilteredGRPOConfig, 2 * LARGE, 1, 0)
    small = {size: arguments(SNRFilteredGRPOConfig, groups, 1, 0, snr_window=size) for size in (*WINDOWS, None)}
    selectors = {size: Selector(args) for size, args in small.items()}
    answers, fed = [], 0
    for until, rewards in probes:
        for generation in stream[fed:until]:
            for selector in selectors.values():
                kept_of(selector, generation)
        fed = until
        first, second = rewards.split(LARGE)
        together = kept_of(Selector(large), second)
        for number, probe in enumerate(second):
            # Ahead of the others and behind them: which of equal scores comes first is no matter of the group.
            among = [kept_of(Selector(large), torch.cat([probe[None], first]))[0]]
            among += [kept_of(Selector(large), torch.cat([first, probe[None]]))[-1]]
            answer = {
                "right": sum(among) / 2,
                "another large batch": together[number],
                "signal": bool(probe.std() > 0),
            }
            companions = second[(torch.arange(1, groups) + number) % LARGE]
            for size, selector in selectors.items():
                answer[str(size)] = kept_of(deepcopy(selector), torch.cat([probe[None], companions]))[0]
            answers.append(answer)
    return answers


def summary(answers: list[dict]) -> dict:
    ways = [name for name in answers[0] if name not in ("right", "signal")]
    agreement = {way: statistics.mean(1 - abs(one[way] - one["right"]) for one in answers) for way in ways}
    signal = [one for one in answers if one["signal"]]
    of_signal = {way: statistics.mean(1 - abs(one[way] - one["right"]) for one in signal) for way in ways}
    kept = {way: statistics.mean(float(one[way]) for one in answers) for way in ("right", *ways)}
    return {"agreement": agreement, "agreement_of_those_with_signal": of_signal, "kept": kept, "asked": len(answers)}


def tenth_from(stream, probes):
    """The same run, with rewards of the second half divided by ten."""
    half = len(stream) // 2
    scaled = [rewards / 10 if number >= half else rewards for number, rewards in enumerate(stream)]
    return scaled, [(until, rewards / 10) if until > half else (until, rewards) for until, rewards in probes]


def measure(groups: int, seeds: int) -> dict:
    env = make_env("frozen_lake")
    steady, changed, seconds, plain, kept = [], [], [], [], []
    for seed in range(seeds):
        probes = Probes(env)
        args = arguments(SNRFilteredGRPOConfig, groups, GROUPS // groups, seed)
        seconds.append(train(SNRFilteredGRPOTrainer, args, env, seed, probes))
        args = arguments(GRPOConfig, groups, GROUPS // groups // 2, seed)
        plain.append(train(GRPOTrainer, args, env, seed))
        steady += decisions(probes.stream, probes.probes, groups)
        later = decisions(*tenth_from(probes.stream, probes.probes), groups)
        changed += later[len(later) // 2 :]
        selector = Selector(arguments(SNRFilteredGRPOConfig, groups, 1, seed))
        kept += [one for rewards in probes.stream for one in kept_of(selector, rewards)]
    update = statistics.mean(seconds) / statistics.mean(plain)
    result = {"steady": summary(steady), "a tenth": summary(changed), "kept": statistics.mean(kept)}
    return result | {"update_seconds": statistics.mean(seconds), "update_of_plain": update}


def markdown(results: dict) -> str:
    lines = ["# Small batches", "", "Made by `python benchmarks/small_batches.py`, which says what is measured.", ""]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    ways = ["another large batch", "None", *map(str, WINDOWS)]
    names = ["another large batch", "by itself", *(f"window {size}" for size in WINDOWS)]
    for part, title in (
        ("steady", "Agreement with a large batch"),
        ("a tenth", "The same in the second half of runs, with all rewards there a tenth of what they were"),
    ):
        lines += [f"## {title}", "", "Of all groups, and in brackets of those with reward variance.", ""]
        lines += ["| prompts a step | " + " | ".join(names) + " |", "|---" * (1 + len(ways)) + "|"]
        for groups, result in results["runs"].items():
            one = result[part]
            pairs = [(one["agreement"][way], one["agreement_of_those_with_signal"][way]) for way in ways]
            lines.append(f"| {groups} | " + " | ".join(f"{a:.1%} ({s:.1%})" for a, s in pairs) + " |")
        lines += ["", "Kept fraction:", "", "| prompts a step | large batch | " + " | ".join(names) + " |"]
        lines.append("|---" * (2 + len(ways)) + "|")
        for groups, result in results["runs"].items():
            kept = result[part]["kept"]
            lines.append(f"| {groups} | " + " | ".join(f"{kept[way]:.1%}" for way in ("right", *ways)) + " |")
        lines.append("")
    lines += ["## Update time, window 256", "", "| prompts a step | kept in the run | seconds | of plain TRL's |"]
    lines.append("|---" * 4 + "|")
    for groups, result in results["runs"].items():
        times = f"{result['update_seconds']:.3f} | {result['update_of_plain']:.3f}"
        lines.append(f"| {groups} | {result['kept']:.1%} | {times} |")
    asked = {result["steady"]["asked"] for result in results["runs"].values()}
    lines += ["", f"Asked about: {', '.join(map(str, sorted(asked)))} groups for each number of prompts."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS_A_STEP, help="measure these alone again")
    choice = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = RESULTS / "small_batches.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    for groups in choice.prompts:
        runs[str(groups)] = measure(groups, choice.seeds)
        print(groups, runs[str(groups)], flush=True)
        results = {"machine": machine(), "seeds": choice.seeds, "runs": dict(sorted(runs.items()))}
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        (RESULTS / "small_batches.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
