"""Mutual information in the form of the reference code: all turns in one matrix, from trajectories or saved ones."""

from dataclasses import replace

import pytest
import torch
from players import policy_fixture as policy_fixture
from players import tokenizer_fixture as tokenizer_fixture
from scored_models import run_in_full

from ragen2_trl.cli.samples import save_rows
from ragen2_trl.instrument import Sampling, find_turns, information_metrics
from research.trajectory_reference import main, measure_trajectory_reference


def played(tokenizer, count, turns=3, length=4):
    """Trajectories of different prompts with several turns of random ids."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(40, 120, (count, 2 + turns * (length + 1)), generator=generator).tolist()
    mask = ([1] * length + [0]) * turns
    return [find_turns(row[:2], row[2:], tokenizer, mask) for row in rows]


def measure(policy, trajectories, num=64, seed=0, **settings):
    generator = torch.Generator().manual_seed(seed)
    sampling = Sampling(num, **settings)
    return measure_trajectory_reference(policy, trajectories, generator, sampling)


def test_all_turns_are_in_one_matrix_of_64_by_64_by_default(policy, tokenizer):
    measured = measure(policy, played(tokenizer, 128))
    assert tuple(measured.cross_logps.shape) == (64, 64)
    assert measured.prompt_index.tolist() == list(range(64))  # each draw is a column of its own
    assert len(set(measured.trajectories)) < 64  # with replacement
    assert 1 / 64 <= measured.metrics["retrieval_chance"] < 1.2 / 64  # equal contexts, drawn twice, are a class


def test_the_matrix_is_that_of_full_runs_of_every_pair(policy, tokenizer):
    trajectories = played(tokenizer, 4)
    measured = measure(policy, trajectories, 10)
    # The same draws, by hand.
    generator, turns = torch.Generator().manual_seed(0), []
    for _ in range(10):
        trajectory = trajectories[int(torch.randint(4, (), generator=generator))]
        turns.append(trajectory[sorted(torch.randperm(3, generator=generator)[:1].tolist())[0]])
    expected = run_in_full(policy, [list(turn.context) for turn in turns], [list(turn.reasoning) for turn in turns])
    torch.testing.assert_close(measured.cross_logps, expected, atol=1e-4, rtol=1e-5)
    classes = [[turn.context for turn in turns].index(turn.context) for turn in turns]
    metrics = information_metrics(
        expected,
        measured.lengths,
        torch.arange(10),
        prompt_class=torch.unique(torch.tensor(classes), return_inverse=True)[1],
    )
    assert measured.metrics["mi_token_tempered"] == pytest.approx(metrics["mi_token_tempered"], abs=1e-5)
    assert measured.metrics["retrieval_chance"] == pytest.approx(metrics["retrieval_chance"])
    chance = sum(classes.count(one) for one in classes) / 10 / 10
    assert measured.metrics["retrieval_chance"] == pytest.approx(chance)


def test_reasonings_that_stand_in_another_column_are_counted(policy, tokenizer):
    trajectories = played(tokenizer, 4)
    measured = measure(policy, trajectories, 10)
    contexts = [trajectories[i] for i in measured.trajectories]
    assert 0 < measured.metrics["verbatim_elsewhere"] < 1
    assert len(contexts) == 10
    assert measure(policy, played(tokenizer, 12, turns=1), 10).metrics["verbatim_elsewhere"] == 0
    # Contexts that tell no earlier reasoning, as `context="memory"` makes them, hold none, however long they are.
    told = [
        [replace(turn, context=turn.context_without_own_words, earlier=()) for turn in one] for one in trajectories
    ]
    assert measure(policy, told, 10).metrics["verbatim_elsewhere"] == 0


def test_saved_completions_give_the_same_numbers(policy, tokenizer, policy_path, tmp_path, capsys):
    trajectories, file = played(tokenizer, 6), tmp_path / "completions.parquet"
    rows = []
    for number, turns in enumerate(trajectories):
        ids, prompt = [*turns[-1].context, *turns[-1].words], turns[0].context
        mask = [1] * (len(ids) - len(prompt))
        for i in (4, 9):
            mask[i] = 0  # of the environment
        of_ids = {"prompt_ids": [*prompt], "completion_ids": ids[len(prompt) :], "env_mask": mask}
        rows.append({"prompt": "", "completion": "", "group": number, "success": 0.0, "clipped": 0.0, **of_ids})
    save_rows(rows, file)
    main([policy_path, str(file), "--seed", "3"])
    printed = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    metrics = measure(policy, trajectories, seed=3).metrics
    assert {name: float(value) for name, value in printed.items()} == pytest.approx(metrics, abs=1e-4)
