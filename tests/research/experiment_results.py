"""Results of experiments that nobody ran, in the store's files: curves whose truth a test sets."""

import json
import zlib
from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from research.store import CURVES, CURVES_SCHEMA, RUNS, RUNS_SCHEMA, WEIGHTS


def curves_of(planned, end=0.6, noise=0.02, steps=None, speed=1.0):
    """Metric -> step -> value of a run whose held-out success goes from 0.45 towards `end`."""
    all_steps = int(planned.fields.get("max_steps", 40))
    done = all_steps if steps is None else steps
    rng = np.random.default_rng(zlib.crc32(f"{planned.key}".encode()))
    task = planned.fields.get("env_name", "frozen_lake")
    of_seed = 0.02 * np.random.default_rng(planned.seed).normal()
    every = int(planned.fields.get("eval_every", 20))
    metrics = {f"eval/env/{task}/success": {}, "entropy": {}, "snr/reward_std_spread": {}, "frac_reward_zero_std": {}}
    for step in [*range(0, done, every), done]:
        truth = 0.45 + (end - 0.45) * (1 - np.exp(-3 * step / all_steps)) + of_seed
        metrics[f"eval/env/{task}/success"][step] = truth + noise * rng.normal()
    measured = {
        "retrieval_accuracy": end + 0.3,
        "mi_zscore_token_tempered": 10 * end,
        "conditional_entropy_token": 1.0,
    }
    for step in range(1, done + 1):
        metrics["entropy"][step] = 1 + 0.1 * rng.normal()
        metrics["snr/reward_std_spread"][step] = end + 0.05 * rng.normal()
        metrics["frac_reward_zero_std"][step] = 0.7 + 0.05 * rng.normal()
        if step % 10 == 1:
            for name, value in measured.items():
                metrics.setdefault(f"mi/first_turn/{name}", {})[step] = value + 0.1 * rng.normal()
            for kind in ("impossible", "possible") if planned.fields.get("variant") == "PulledToTemplates" else ():
                metrics.setdefault(f"retrieval/{kind}", {})[step] = end + 0.1 * rng.normal()
    for name, rate in {"seconds": 1.5, "cpu_seconds": 1.4, "sampled_tokens": 4e3, "update_tokens": 6e3,
                       "update_flops": 5e10}.items():  # fmt: skip
        cost = rate * speed if name != "sampled_tokens" else rate
        metrics[f"cost/{name}"] = {0: 0.0} | {step: cost * step for step in range(1, done + 1)}
    for number in range(4):  # of its parameters, near those that all runs of a seed end with
        metrics[f"{WEIGHTS}{number}"] = {done: of_seed + 1e-6 * rng.normal()}
    if planned.fields.get("variant") == "MeasuresGradients":
        for step in sorted({1, all_steps // 2, all_steps} - {0}):
            for bucket in range(1, 7):
                deviation = 0.08 * (bucket - 1)
                at = f"grad/bucket_{bucket}"
                metrics.setdefault(f"{at}/reward_std", {})[step] = deviation
                metrics.setdefault(f"{at}/task/norm", {})[step] = deviation * np.exp(0.1 * rng.normal())
                for part in ("kl", "entropy"):
                    metrics.setdefault(f"{at}/{part}/norm", {})[step] = 0.01 * np.exp(0.1 * rng.normal())
    return metrics


def write_results(folder, planned_runs, simulate: Callable = curves_of):
    """The two files of a store, of different runs."""
    rows, records = [], []
    for planned in {planned.key: planned for planned in planned_runs}.values():
        metrics = simulate(planned)
        rows += [
            (planned.key, step, metric, value) for metric, points in metrics.items() for step, value in points.items()
        ]
        costs = {name: list(metrics[f"cost/{name}"].values())[-1] for name in RUNS_SCHEMA.names
                 if f"cost/{name}" in metrics}  # fmt: skip
        records.append(
            {
                **dict.fromkeys(RUNS_SCHEMA.names),
                **costs,
                "key": planned.key,
                "fields": json.dumps(planned.fields),
                "seed": planned.seed,
                "steps": max(metrics["cost/seconds"]),
                "sampled_tokens": int(costs["sampled_tokens"]),
                "update_tokens": int(costs["update_tokens"]),
                "wall_seconds": 100.0,
                "host_cores": 2,
                "versions": json.dumps({"python": "3.11.2", "torch": "2.13.0", "trl": "1.16.0"}),
                "finished": datetime(2026, 11, 22, tzinfo=UTC),
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    table = pa.table(
        [
            pa.array(columns[0], pa.string()).dictionary_encode(),
            pa.array(columns[1], pa.int32()),
            pa.array(columns[2], pa.string()).dictionary_encode(),
            pa.array(columns[3], pa.float32()),
        ],
        schema=CURVES_SCHEMA,
    )
    pq.write_table(table, folder / CURVES)
    pq.write_table(pa.Table.from_pylist(records, RUNS_SCHEMA), folder / RUNS)
