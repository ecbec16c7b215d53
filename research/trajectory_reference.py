"""Mutual information in the form of RAGEN's code, to compare with its published numbers: all turns in one matrix.

    ragen2-trl diagnose --model runs/my_run --env_args max_turns=5 --output_dir runs/diagnosis
    python -m research.trajectory_reference runs/my_run runs/diagnosis/completions.parquet

The reference's MI is `mi_token_tempered`. TRL saves completions as text; of these only first turns are read.

No number here proves that reasoning depends on its prompt: the context of a later turn holds the reasoning of earlier
ones verbatim, so that a trace can be likelier under it than under its own. That lowers retrieval and mutual
information. Mixing turns of all positions raises them, since a first turn is easily told from a fourth.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ragen2_trl.cli.models import load_model
from ragen2_trl.cli.samples import read_sample, read_saved
from ragen2_trl.instrument import (
    Measurement,
    NotMeasurableError,
    Sampling,
    Trajectories,
    Turn,
    cross_score,
    information_metrics,
)
from ragen2_trl.instrument.diagnosis import draw


def measure_trajectory_reference(
    model: nn.Module,
    trajectories: Trajectories | Sequence[Sequence[Turn]],
    generator: torch.Generator,
    sampling: Sampling,
) -> Measurement:
    """Scores reasoning of all turns under the contexts of all turns (arXiv 2604.06268, trajectory-uniform sampling).

    A trajectory is drawn uniformly, then one of its turns that has reasoning, with replacement and as often as there
    are completions to score; a draw of a trajectory without reasoning is lost. Each draw is a column of its own, and
    equal contexts form a class: 64 x 64 with the default sampling, chance 1/64 where all contexts differ.

    Args:
        model: The policy.
        trajectories: Turns of each completion.
        generator: Draws the sample.
        sampling: The smaller of `num_completions` and `max_prompts` is the number of draws.

    Returns:
        A measurement. Its `metrics` also have `verbatim_elsewhere`, the fraction of reasoning traces that stand in
        another drawn context of their trajectory.

    Raises:
        NotMeasurableError: With fewer than two distinct contexts, or without any reasoning.
    """
    drawn: list[tuple[int, Turn]] = []  # (trajectory, turn)
    for _ in range(min(sampling.num_completions, sampling.max_prompts)):
        number = int(torch.randint(len(trajectories), (), generator=generator))
        reasoned = [turn for turn in trajectories[number] if turn.reasoning]
        drawn += [(number, turn) for turn in draw(reasoned, 1, generator)]
    if not drawn:
        raise NotMeasurableError("no completion has reasoning")
    numbers, turns = [number for number, _ in drawn], [turn for _, turn in drawn]
    class_of: dict[tuple[int, ...], int] = {}
    prompt_class = [class_of.setdefault(turn.context, len(class_of)) for turn in turns]
    if len(class_of) < 2:
        raise NotMeasurableError(f"all {len(turns)} contexts are the same, and two different ones are needed")
    traces = [turn.reasoning[: sampling.max_tokens] for turn in turns]
    cross_logps = cross_score(
        model,
        [turn.context for turn in turns],
        [turn.lead_in + trace for turn, trace in zip(turns, traces, strict=True)],
        lead_in=[len(turn.lead_in) for turn in turns],
        temperature=sampling.temperature,
        max_tokens_per_forward=sampling.max_tokens_per_forward,
        split_over_processes=sampling.split_over_processes,
    )
    lengths, prompt_index = torch.tensor([len(trace) for trace in traces]), torch.arange(len(turns))
    metrics = information_metrics(cross_logps, lengths, prompt_index, prompt_class=torch.tensor(prompt_class))
    elsewhere = [
        any(_holds(one.context, turn.reasoning) for i, one in drawn if i == number and one.context != turn.context)
        for number, turn in drawn
    ]
    metrics["verbatim_elsewhere"] = sum(elsewhere) / len(elsewhere)
    return Measurement(metrics, cross_logps, lengths, prompt_index, numbers, numbers)


def _holds(context: tuple[int, ...], reasoning: tuple[int, ...]) -> bool:
    """Whether a context holds all ids of a reasoning trace in their order."""
    size = len(reasoning)
    return any(context[start : start + size] == reasoning for start in range(len(context) - size + 1))


def main(args: Sequence[str] | None = None) -> None:
    """Print the metrics of saved completions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", help="The policy that sampled them: a path, a Hub id or a model that is shipped.")
    parser.add_argument("completions", type=Path, help="A file that ragen2-trl diagnose wrote, or could read.")
    parser.add_argument("--temperature", type=float, default=1.0, help="Of the sampling.")
    parser.add_argument("--seed", type=int, default=0, help="Draws trajectories and turns.")
    options = parser.parse_args(args)
    rows = read_saved(options.completions)
    model, tokenizer = load_model(options.model)
    sample = read_sample(tokenizer, rows, options.completions.stem)
    trajectories = Trajectories(sample.prompt_ids, sample.completion_ids, tokenizer, sample.masks, sample.turn_samples)
    generator, sampling = torch.Generator().manual_seed(options.seed), Sampling(temperature=options.temperature)
    for name, value in measure_trajectory_reference(model, trajectories, generator, sampling).metrics.items():
        sys.stdout.write(f"{name}: {value:.4f}\n")


if __name__ == "__main__":
    main()
