"""The metric of `evaluate`: the numbers of `information_metrics`, by every way that `evaluate` has to ask for them."""

import json
import socket

import evaluate
import numpy as np
import pytest
import torch
from datasets import Features, Value

from ragen2_trl import information_metrics
from ragen2_trl.reporting import ReasoningInformation

B, N = 6, 3
MATRIX = -50 * torch.rand(B, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
INPUTS = {"cross_logps": MATRIX.tolist(), "lengths": [5, 6, 7, 8, 9, 10], "prompt_index": [0, 0, 1, 1, 2, 2]}
EXPECTED = information_metrics(MATRIX, torch.tensor(INPUTS["lengths"]), torch.tensor(INPUTS["prompt_index"]))


class MeanLength(evaluate.Metric):
    """Another metric that is no module of the Hub."""

    def _info(self):
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=Features({"lengths": Value("int64")})
        )

    def _compute(self, *, lengths):
        return {"mean_length": sum(lengths) / len(lengths)}


@pytest.fixture(params=[True, False], ids=["in_memory", "on_disk"])
def options(request, tmp_path):
    return {"keep_in_memory": request.param, "cache_dir": str(tmp_path / "cache")}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_compute_gives_the_information_metrics(options):
    assert ReasoningInformation(**options).compute(**INPUTS) == EXPECTED


@pytest.mark.parametrize("convert", [torch.from_numpy, np.asarray])
def test_tensors_and_arrays_are_as_good_as_lists(convert, options):
    inputs = {name: convert(np.array(values)) for name, values in INPUTS.items()}
    assert ReasoningInformation(**options).compute(**inputs) == EXPECTED


def test_rows_can_be_added_one_by_one_and_in_batches(options):
    metric = ReasoningInformation(**options)
    rows = [dict(zip(INPUTS, row, strict=True)) for row in zip(*INPUTS.values(), strict=True)]
    metric.add(**rows[0])
    metric.add(**rows[1])
    metric.add_batch(**{name: values[2:] for name, values in INPUTS.items()})
    assert metric.compute() == EXPECTED


def test_an_instance_can_be_used_again(options):
    metric = ReasoningInformation(**options)
    metric.compute(**INPUTS)
    assert metric.compute(**INPUTS) == EXPECTED


def test_identical_prompts_are_given_to_compute(options):
    classes = [0, 0, 1]
    metrics = ReasoningInformation(**options).compute(**INPUTS, prompt_class=classes)
    assert metrics["num_prompts"] == 2.0
    assert metrics == information_metrics(
        MATRIX,
        torch.tensor(INPUTS["lengths"]),
        torch.tensor(INPUTS["prompt_index"]),
        prompt_class=torch.tensor(classes),
    )


def test_it_combines_with_another_metric(options):
    combined = evaluate.combine([ReasoningInformation(**options), MeanLength(**options)])
    combined.add_batch(**INPUTS)
    assert combined.compute() == {**EXPECTED, "mean_length": 7.5}


def test_two_of_them_combine_under_names_of_their_own(options):
    combined = evaluate.combine({"early": ReasoningInformation(**options), "late": ReasoningInformation(**options)})
    metrics = combined.compute(**INPUTS)
    assert metrics == {f"{name}_{key}": value for name in ("early", "late") for key, value in EXPECTED.items()}


@pytest.mark.needs("git")  # `evaluate` asks it for the commit
def test_results_are_saved_as_json(options, tmp_path):
    path = evaluate.save(tmp_path / "results.json", **ReasoningInformation(**options).compute(**INPUTS))
    saved = json.loads(path.read_text())
    assert {key: saved[key] for key in EXPECTED} == EXPECTED


def test_it_describes_itself(options):
    metric = ReasoningInformation(**options)
    assert metric.name == "reasoning_information"
    assert "2604.06268" in metric.citation
    assert "prompt" in metric.description
    assert all(name in metric.inputs_description for name in [*metric.features, "prompt_class"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cross_logps": [[-1.0, -2.0]] * 5 + [[-1.0]]}, r"cross_logps must have rows of equal length, .*\[1, 2\]"),
        ({"prompt_index": [0, 0, 1, 1, 2, 3]}, "prompt_index must be between 0 and 2, got 0 to 3"),
        ({"lengths": [0] * B}, "lengths must be at least 1, got 0"),
        ({"prompt_kind": [0, 0, 1]}, r"got \['prompt_kind'\]"),
    ],
)
def test_bad_inputs_are_named(changes, message, options):
    with pytest.raises(ValueError, match=message):
        ReasoningInformation(**options).compute(**{**INPUTS, **changes})
