"""How the measurements of `gpu.py` are told: each in a line, and all of them on a page."""

from typing import Any

from research.benchmarks.filter_step_time import FRACTIONS, GROUP_SIZE, GROUPS


def of_plain(row: dict[str, Any], rows: list[dict[str, Any]], name: str) -> float | None:
    """A row's number over that of plain TRL with the same model and batch."""
    same = ("model", "rows", "checkpointing")
    plain = (other for other in rows if other.get("variant") == "plain" and all(other[k] == row[k] for k in same))
    before = next(plain, {})
    return row[name] / before[name] if name in row and name in before else None


def update_line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    ratio, memory = of_plain(row, rows, "seconds"), of_plain(row, rows, "memory_mib")
    compared = (
        ""
        if ratio is None or row["variant"] == "plain"
        else f", {ratio:.3f} of plain TRL's time and {memory:.3f} of its memory"
    )
    on = "on" if row["checkpointing"] else "off"
    return (
        f"{row['model']}, {row['rows']} rows, checkpointing {on}, {row['variant']}, kept {row['kept']:.2f}: "
        f"{row['seconds']:.2f} s, {row['memory_mib']:,.0f} MiB{compared}"
    )


def scoring_line(row: dict[str, Any]) -> str:
    ours, rounding = (row["root_mean_square_nats"][name] for name in ("default", "one by one"))
    return (
        f"{row['model']}, {row['shape'][0]} x {row['shape'][1]}: {row['speedup']:.1f} x faster than the reference's "
        f"way; error in bfloat16 {ours:.3f} nats (one pair at a time: {rounding:.3f})"
    )


def step_line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']}, {row['variant']}: generation {row['generation']:.2f} s, update {row['update']:.2f} s "
        f"({row['generation_share']:.2f} of the step is generation), measuring {row['measuring']:.2f} s "
        f"({row['callback_share']:.4f} on top of training at every tenth step)"
    )


def cell(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)


def update_table(rows: list[dict[str, Any]]) -> list[str]:
    drops = "".join(f" drop, kept {fraction:.2f} | its memory |" for fraction in FRACTIONS)
    lines = [f"| model | rows per device | checkpointing | plain TRL | its memory |{drops}", "|---" * 11 + "|"]
    for key in dict.fromkeys((row["model"], row["rows"], row["checkpointing"]) for row in rows):
        of_key = [row for row in rows if (row["model"], row["rows"], row["checkpointing"]) == key]
        plain = next((row for row in of_key if row["variant"] == "plain"), None)
        cells = ["not measured", ""] if plain is None else [f"{plain['seconds']:.2f} s", _mib(plain["memory_mib"])]
        for fraction in FRACTIONS:
            row = next((row for row in of_key if (row["variant"], row["kept"]) == ("drop", fraction)), {"model": None})
            names = ("seconds", "memory_mib")
            ratios = [None, None] if row["model"] is None else [of_plain(row, rows, name) for name in names]
            cells += [cell(ratio) for ratio in ratios]
        lines.append(f"| {key[0]} | {key[1]} | {'on' if key[2] else 'off'} | {' | '.join(cells)} |")
    return lines


def _mib(value: float) -> str:
    return f"{value:,.0f} MiB"


def scoring_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | N x NK | reference, s a prompt | ours | speed-up | memory, of the reference's | tokens, of N·P + "
        "N·NK·T | error of ours, nats | one pair at a time | largest: ours | one pair at a time | mean |",
        "|---" * 12 + "|",
    ]
    for row in rows:
        seconds, memory = row["seconds"], row["memory_mib"]
        share = memory["default"] / memory["reference"] if memory["reference"] else None
        errors, largest = row["root_mean_square_nats"], row["largest_nats"]
        lines.append(
            f"| {row['model']} | {row['shape'][0]} x {row['shape'][1]} | {seconds['reference']:.3f} | "
            f"{seconds['default']:.3f} | {row['speedup']:.1f} | {cell(share, '.2f')} | {row['tokens_of_bound']:.3f} | "
            f"{errors['default']:.3f} | {errors['one by one']:.3f} | {largest['default']:.3f} | "
            f"{largest['one by one']:.3f} | {row['mean_nats']:,.0f} |"
        )
    lines += ["", "Errors are root mean squares of the difference to float32, one pair at a time."]
    budgets = [name for name in (rows[0]["seconds"] if rows else ()) if name.isdecimal()]
    if budgets:
        lines += [
            "",
            "Seconds with other bounds of a forward pass, as a fraction of the default's (8,192 tokens, and fewer "
            "where that many logits would be too large), and the error:",
            "",
            f"| model | N x NK |{''.join(f' {int(name):,} tokens |' for name in budgets)}",
            "|---" * (2 + len(budgets)) + "|",
        ]
    for row in rows:
        seconds, errors = row["seconds"], row["root_mean_square_nats"]
        cells = [f"{seconds[name] / seconds['default']:.2f}, {errors[name]:.3f} nats" for name in budgets]
        lines.append(f"| {row['model']} | {row['shape'][0]} x {row['shape'][1]} | {' | '.join(cells)} |")
    return lines


def step_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | | generation | update | generation's share | measuring | on top of training, every tenth step |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['variant']} | {row['generation']:.2f} s | {row['update']:.2f} s | "
            f"{row['generation_share']:.1%} | {row['measuring']:.2f} s | {row['callback_share']:.2%} |"
        )
    return lines


def markdown(results: dict[str, Any], titles: dict[str, str]) -> str:
    """The page of all results, given the title of each part."""
    sizes, tables = results["sizes"], {"scoring": scoring_table, "steps": step_table}
    lines = [
        "# On a GPU",
        "",
        "Made by `research/benchmarks/gpu.sh`; `research/benchmarks/gpu.py` says what is measured.",
        "",
    ]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    (shortest, longest), count = sizes["completion"], GROUPS * GROUP_SIZE
    lines += [
        f"Random weights in bfloat16, vocabulary {sizes['vocabulary']:,}. Updates of {count} completions of "
        f"{shortest:,} to {longest:,} tokens behind prompts of {sizes['prompt']:,}; ratios are of plain TRL's time "
        f"and peak memory. Steps of 64 completions of {sizes['generated']:,} tokens, generated by transformers.",
        "",
    ]
    if results["dry"]:
        lines += ["**Dry: sizes are cut and models tiny. These numbers say nothing but that it runs.**", ""]
    for name, title in titles.items():
        rows = results["rows"][name]
        lines += [f"## {title}", "", *(tables.get(name, update_table)(rows) if rows else ["Not measured."]), ""]
    missing = [f"- {line}" for line in results["missing"]]
    return "\n".join([*lines, "## Not measured", "", *(missing or ["Nothing: all cases were."])]) + "\n"
