"""The tables of time to success, of curves that are straight lines."""

from pathlib import Path

from experiment_results import curves_of, write_results

from research.benchmarks import time_to_success
from research.plan import read_experiment

FILE = Path(__file__).parents[2] / "research" / "experiments" / "ours2.yaml"
STEPS = 256
RISE = {"drop, selection": 0.2, "TRL": 0.1, "mask": 0.1}  # of held-out success, where it is learnt from


def straight(planned):
    """Selection learns anywhere, at half of the cost a step; the others not where 70 % are impossible."""
    method, hard = planned.levels["method"], planned.levels["prompts"] == "70 % impossible"
    rise = 0.0 if hard and method != "drop, selection" else RISE[method]
    metrics = curves_of(planned, speed=0.5 if method == "drop, selection" else 1.0)
    metrics["eval/env/frozen_lake/success"] = {step: 0.44 + rise * step / STEPS for step in range(0, STEPS + 1, 32)}
    return metrics


def test_tables_are_those_of_straight_lines(tmp_path):
    planned_runs = [
        planned
        for planned in read_experiment(FILE).planned_runs()
        if planned.levels["prompts"] in ("30 % impossible", "70 % impossible") and planned.levels["method"] in RISE
    ]
    write_results(tmp_path, planned_runs, straight)
    page = time_to_success.as_page(time_to_success.grid_of(FILE, tmp_path))
    assert "30 of 150 runs are done." in page
    tables = {}
    for section in page.split("\n## ")[1:]:
        title, *lines = section.splitlines()
        rows = [[entry.strip() for entry in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
        at = [rows[0].index(name) for name in ("30 % impossible", "70 % impossible")]
        tables[title] = {row[0]: [row[n] for n in at] for row in rows[1:]}

    # Plain TRL's final success is that of its last fifth, which begins after step 204: the mean of steps 224 and 256,
    # where it is at step 240. Selection is there at step 120, at half the cost a step.
    to_final = tables["Processor time: of plain TRL's to reach its final success"]
    assert to_final["drop, selection"] == ["0.25 (0.25 to 0.25)", "none"]
    assert to_final["mask"] == ["1.00 (1.00 to 1.00)", "none"]
    # Five points are reached after 128 of TRL's steps, and after 64 cheaper ones.
    to_gain = tables["Processor time: of plain TRL's to reach five points above the model before training"]
    assert to_gain["drop, selection"] == ["0.25 (0.25 to 0.25)", "<= 0.12 (0.12 to 0.12)"]
    assert to_gain["mask"] == ["1.00 (1.00 to 1.00)", "? 1.00 (1.00 to 1.00)"]
    # Over the last fifth of its cost selection is at 0.62 on average, and TRL always at 0.44.
    at_equal = tables["Processor time: points ahead of plain TRL at equal cost"]
    assert at_equal["drop, selection"][1].startswith("+18.0 (")
    assert tables["Success at the end"]["TRL"] == ["53.4 %", "44.0 %"]
    costs = ("Processor time", "Wall clock", "Sampled tokens", "FLOPs of the update")
    of_costs = (time_to_success.TO_FINAL, time_to_success.TO_GAIN, time_to_success.AT_EQUAL)
    assert tables.keys() == {"Success at the end"} | {f"{cost}: {table}" for cost in costs for table in of_costs}
