"""Proxies of mutual information: agreement with the reference implementation, and the properties they must have."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen2_trl.instrument.information import MarginalStdEMA, information_metrics

# Five matrices with what the reference implementation's own functions make of them.
REFERENCE = json.loads((Path(__file__).parent / "data" / "ragen2_mi_vectors.json").read_text())
NAMES = {
    "mi_estimate": "mi_token_tempered",
    "mi_seq_estimate": "mi_seq",
    "paper_mi_per_token": "mi_token",
    "conditional_entropy_est": "conditional_entropy_token",
    "conditional_entropy_seq_est": "conditional_entropy_seq",
    "reasoning_entropy_seq_est": "marginal_entropy_seq",
    "marginal_std": "marginal_std_token_tempered",
    "marginal_std_seq": "marginal_std_seq",
    "mi_zscore": "mi_zscore_token_tempered",
    "mi_zscore_seq": "mi_zscore_seq",
    "mi_upper_bound": "mi_upper_bound",
    "retrieval_accuracy": "retrieval_accuracy",
    "retrieval_chance_level": "retrieval_chance",
    **{f"retrieval_accuracy@{k}": f"retrieval_accuracy@{k}" for k in (2, 4, 8)},
    **{f"retrieval_chance_level@{k}": f"retrieval_chance@{k}" for k in (2, 4, 8)},
}
DEPTHS = {"": 1, "@2": 2, "@4": 4, "@8": 8}
MI_FORMS = ("mi_seq", "mi_token", "mi_token_tempered")


def measure(logps, lengths=None, index=None, classes=None, **options) -> dict[str, float]:
    """Metrics of nested lists; by default one token a row, and the columns taken in turn."""
    rows, columns = len(logps), len(logps[0])
    return information_metrics(
        torch.tensor(logps, dtype=torch.float64),
        torch.tensor(lengths or [1] * rows),
        torch.tensor(index or [row % columns for row in range(rows)]),
        prompt_class=None if classes is None else torch.tensor(classes),
        **options,
    )


def separable(prompts: int, copies: int = 1, gap: float = 1000.0) -> list[list[float]]:
    """Prompts in blocks of identical ones; each reasoning is certain under its own block and impossible elsewhere."""
    return [[-3.0 if i // copies == j // copies else -gap for j in range(prompts)] for i in range(prompts)]


LOGPS = st.floats(-60.0, 0.0)


@st.composite
def measurements(draw, values=LOGPS, max_columns=5):
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(2, max_columns))
    classes = draw(st.lists(st.integers(0, 3), min_size=columns, max_size=columns).filter(lambda c: len(set(c)) > 1))
    return (
        draw(st.lists(st.lists(values, min_size=columns, max_size=columns), min_size=rows, max_size=rows)),
        draw(st.lists(st.integers(1, 40), min_size=rows, max_size=rows)),
        draw(st.lists(st.integers(0, columns - 1), min_size=rows, max_size=rows)),
        classes,
    )


@pytest.mark.parametrize("number", range(len(REFERENCE)))
def test_metrics_agree_with_the_reference(number: int):
    case = REFERENCE[number]
    expected = case["expected"]
    metrics = measure(case["cross_logps"], case["lengths"], case["prompt_index"])
    ours = {name: metrics[NAMES[name]] for name in NAMES}
    assert ours == pytest.approx({name: expected[name] for name in NAMES}, abs=1e-4)
    assert metrics["conditional_entropy_token"] + metrics["mi_token_tempered"] == pytest.approx(
        expected["reasoning_entropy_est"], abs=1e-4
    )


@given(measurements())
def test_mutual_information_entropies_and_zscores_match_a_plain_loop_over_equation_1(measurement):
    logps, lengths, index, classes = measurement
    sums = {"own": dict.fromkeys(MI_FORMS, 0.0), "mi": dict.fromkeys(MI_FORMS, 0.0)}
    mixtures = {form: [] for form in MI_FORMS}
    for row, length, own in zip(logps, lengths, index, strict=True):
        mixture = math.log(sum(math.exp(logp) for logp in row) / len(row))
        tempered = math.log(sum(math.exp(logp / length) for logp in row) / len(row))
        owns = (row[own], row[own] / length, row[own] / length)
        for form, of_own, of_all in zip(MI_FORMS, owns, (mixture, mixture / length, tempered), strict=True):
            mixtures[form].append(of_all)
            sums["own"][form] += of_own
            sums["mi"][form] += of_own - of_all
    metrics, rows = measure(logps, lengths, index, classes), len(logps)
    for form in MI_FORMS:
        mi, mean = sums["mi"][form] / rows, sum(mixtures[form]) / rows
        std = math.sqrt(sum((value - mean) ** 2 for value in mixtures[form]) / rows)
        name = form.removeprefix("mi_")
        assert metrics[form] == pytest.approx(mi, abs=1e-9)
        assert metrics[f"marginal_std_{name}"] == pytest.approx(std, abs=1e-9)
        assert metrics[f"mi_zscore_{name}"] == pytest.approx(metrics[form] / (std + 1e-3), abs=1e-5)
    for form in ("seq", "token"):
        own, mean = sums["own"][f"mi_{form}"] / rows, sum(mixtures[f"mi_{form}"]) / rows
        assert metrics[f"conditional_entropy_{form}"] == pytest.approx(-own, abs=1e-9)
        assert metrics[f"marginal_entropy_{form}"] == pytest.approx(-mean, abs=1e-9)
    assert (metrics["num_completions"], metrics["num_prompts"]) == (rows, len(set(classes)))


@given(measurements())
def test_mutual_information_stays_below_its_bound_however_prompts_repeat(measurement):
    logps, lengths, index, classes = measurement
    first = [classes.index(name) for name in classes]  # identical prompts score the same
    logps = [[row[column] for column in first] for row in logps]
    metrics = measure(logps, lengths, index, classes)
    assert metrics["mi_seq"] <= metrics["mi_upper_bound"] + 1e-9
    sizes = [classes.count(classes[own]) for own in index]
    assert metrics["mi_upper_bound"] == pytest.approx(sum(math.log(len(classes) / d) for d in sizes) / len(sizes))


@given(measurements(values=st.sampled_from([-2.0, -1.0, 0.0])))
def test_retrieval_is_the_mean_over_all_ways_to_break_ties(measurement):
    logps, lengths, index, classes = measurement
    metrics = measure(logps, lengths, index, classes)
    orders = list(itertools.permutations(range(len(classes))))
    for suffix, depth in DEPTHS.items():
        hits = 0
        for row, own in zip(logps, index, strict=True):
            for order in orders:
                best = sorted(order, key=lambda column: -row[column])[:depth]
                hits += any(classes[column] == classes[own] for column in best)
        expected = hits / len(orders) / len(logps)
        assert metrics[f"retrieval_accuracy{suffix}"] == pytest.approx(expected, abs=1e-12)


@given(measurements(max_columns=9))
def test_chance_is_the_share_of_column_subsets_that_hold_an_own_prompt(measurement):
    logps, lengths, index, classes = measurement
    metrics = measure(logps, lengths, index, classes)
    for suffix, depth in DEPTHS.items():
        subsets = list(itertools.combinations(classes, min(depth, len(classes))))
        expected = sum(classes[own] in subset for own in index for subset in subsets) / len(subsets) / len(index)
        assert metrics[f"retrieval_chance{suffix}"] == pytest.approx(expected, abs=1e-12)


def test_a_hit_on_an_identical_prompt_counts():
    logps = [[-2.0, -1.0, -3.0]]
    assert measure(logps, index=[0], classes=[5, 5, 7])["retrieval_accuracy"] == 1.0
    assert measure(logps, index=[0])["retrieval_accuracy"] == 0.0


def test_reasoning_that_ignores_its_prompt_lands_exactly_on_chance():
    metrics = measure([[-7.0] * 6] * 5, [3, 1, 4, 1, 5], [0, 5, 2, 2, 3], [0, 0, 0, 1, 2, 2])
    assert [metrics[form] for form in MI_FORMS] == pytest.approx([0.0] * 3, abs=1e-12)
    for suffix in DEPTHS:
        assert metrics[f"retrieval_accuracy{suffix}"] == metrics[f"retrieval_chance{suffix}"]
    assert 0 < metrics["retrieval_chance"] < 1


@pytest.mark.parametrize("prompts", [2, 7, 64])
def test_mutual_information_is_log_n_for_separable_prompts(prompts: int):
    metrics = measure(separable(prompts))
    assert metrics["mi_seq"] == pytest.approx(math.log(prompts)) == pytest.approx(metrics["mi_upper_bound"])
    assert metrics["retrieval_accuracy"] == 1.0
    assert metrics["retrieval_chance"] == pytest.approx(1 / prompts)


def test_the_form_per_token_shrinks_with_length_and_the_tempered_one_does_not():
    logps = [[-1.0 * length if i == j else -2.0 * length for j in range(8)] for i, length in enumerate([20, 200] * 4)]
    short, long = measure(logps[::2], [20] * 4, [0, 2, 4, 6]), measure(logps[1::2], [200] * 4, [1, 3, 5, 7])
    assert long["mi_token"] == pytest.approx(short["mi_token"] / 10, rel=1e-3)
    assert long["mi_token_tempered"] == pytest.approx(short["mi_token_tempered"])


@given(measurements(), st.sampled_from([-20_000.0, -7.0, 5.0]))
def test_a_constant_added_to_a_row_changes_no_mutual_information(measurement, constant):
    logps, lengths, index, classes = measurement
    moved = [[logp + constant for logp in logps[0]], *logps[1:]]
    before, after = measure(logps, lengths, index, classes), measure(moved, lengths, index, classes)
    for form in MI_FORMS:
        assert after[form] == pytest.approx(before[form], abs=1e-8)


def test_half_precision_input_is_computed_in_double_precision():
    logps = torch.tensor([[-1024.0, -1032.0], [-1040.0, -1024.0]])
    arguments = torch.tensor([9, 9]), torch.tensor([0, 1])
    assert information_metrics(logps.bfloat16(), *arguments) == information_metrics(logps, *arguments)


def test_prefix_stands_before_every_key():
    plain, prefixed = measure(separable(3)), measure(separable(3), prefix="collapse/")
    assert prefixed == {f"collapse/{key}": value for key, value in plain.items()}


VALID = {
    "cross_logps": torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]),
    "lengths": torch.tensor([4, 5]),
    "prompt_index": torch.tensor([0, 2]),
    "prompt_class": torch.tensor([0, 1, 2]),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cross_logps": torch.zeros(6)}, r"cross_logps must have shape .* got \(6,\)"),
        ({"cross_logps": torch.zeros(0, 3)}, r"cross_logps must have shape .* got \(0, 3\)"),
        ({"lengths": torch.tensor([4])}, r"lengths must have shape \(2,\), got \(1,\)"),
        ({"prompt_index": torch.tensor([0, 1, 2])}, r"prompt_index must have shape \(2,\), got \(3,\)"),
        ({"prompt_class": torch.tensor([0, 1])}, r"prompt_class must have shape \(3,\), got \(2,\)"),
        ({"cross_logps": torch.tensor([[0.0, 0, 0], [0, -torch.inf, 0]])}, r"cross_logps .* got -inf at \[1, 1\]"),
        ({"cross_logps": torch.tensor([[0.0, 0, torch.nan], [0, 0, 0]])}, r"cross_logps .* got nan at \[0, 2\]"),
        ({"lengths": torch.tensor([4, 0])}, "lengths must be at least 1, got 0"),
        ({"prompt_index": torch.tensor([0, 3])}, "prompt_index must be between 0 and 2, got 0 to 3"),
        ({"prompt_index": torch.tensor([-1, 2])}, "prompt_index must be between 0 and 2, got -1 to 2"),
        ({"prompt_class": torch.tensor([4, 4, 4])}, "prompt_class must hold at least two .* got one in 3 columns"),
    ],
)
def test_input_that_does_not_fit_is_named(changes, message):
    information_metrics(**VALID)
    with pytest.raises(ValueError, match=message):
        information_metrics(**VALID | changes)


def test_one_column_is_too_few():
    with pytest.raises(ValueError, match="at least two distinct prompts"):
        information_metrics(torch.zeros(2, 1), torch.tensor([1, 1]), torch.tensor([0, 0]))


def deviations(value: float) -> dict[str, float]:
    forms = ("seq", "token", "token_tempered")
    return {f"marginal_std_{form}": value for form in forms} | {f"mi_{form}": 0.5 for form in forms}


def test_running_scale_starts_at_the_first_value_decays_as_the_reference_does_and_resumes():
    metrics, scale = measure(separable(4), [5, 9, 2, 3]), MarginalStdEMA(decay=0.9)
    first = MarginalStdEMA().update(metrics)
    for form in ("seq", "token", "token_tempered"):
        assert first[f"mi_zscore_ema_{form}"] == pytest.approx(metrics[f"mi_zscore_{form}"])
    scale.update(deviations(2.0))
    scale.update(deviations(1.0))
    resumed = MarginalStdEMA(decay=0.9, values=json.loads(json.dumps(scale.values)))
    scores = scale.update(deviations(4.0))
    expected = 0.9 * (0.9 * 2.0 + 0.1 * 1.0) + 0.1 * 4.0
    assert scale.values == pytest.approx(dict.fromkeys(("seq", "token", "token_tempered"), expected))
    assert scores["mi_zscore_ema_token"] == pytest.approx(0.5 / (expected + 1e-3))
    assert resumed.update(deviations(4.0)) == scores
    assert MarginalStdEMA().values == {}  # which no two share


@pytest.mark.parametrize("decay", [1.0, -0.1, math.nan])
def test_decay_outside_its_range_is_named(decay: float):
    with pytest.raises(ValueError, match=f"decay must be .* got {decay}"):
        MarginalStdEMA(decay=decay)
