"""What README and docs/ say of metrics, defaults and refusals is what the code does."""

import ast
import re

import numpy as np
import pytest
from pages import PAGES, ROOT, SMALL, quoted, rows, scripts
from trl import RLOOConfig

from ragen2_trl import (
    CostCallback,
    EnvironmentEvalCallback,
    GradientSNRCallback,
    MutualInformationCallback,
    RewardVarianceStopCallback,
    SNRFilteredGRPOConfig,
    SNRFilteredGRPOTrainer,
    TextRollout,
)
from ragen2_trl.envs import make_env
from ragen2_trl.experiments.checks import CURVES_ONLY
from ragen2_trl.instrument import REFERENCE_SCOPE, SCOPES
from ragen2_trl.tiny import resolve_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """All keys that a short training in several turns logs, with refill, prompt selection and every callback; and
    those of one with importance weights, which do not go with refill."""
    env = make_env("sokoban", multi_turn=True)
    settings = {
        **SMALL,
        "output_dir": str(tmp_path_factory.mktemp("logged")),
        "max_steps": 2,
        "per_device_train_batch_size": 16,
        "max_completion_length": 160,
        "save_strategy": "no",
        "beta": 0.01,
        "snr_selection_eps": 0.0,
        "snr_refill_rounds": 1,
        "snr_prompt_selection": True,
    }
    args = SNRFilteredGRPOConfig(**settings)
    rollout = TextRollout(env)
    model = resolve_model("tiny-sokoban")
    trainer = SNRFilteredGRPOTrainer(model, env.reward_funcs, args, env.dataset(16, seed=0), rollout_func=rollout)
    trainer.add_callback(MutualInformationCallback(trainer, every=1, scopes=(*SCOPES, REFERENCE_SCOPE)))
    trainer.add_callback(GradientSNRCallback(trainer, every=2))
    trainer.add_callback(RewardVarianceStopCallback(trainer, start_generations=1))
    trainer.add_callback(EnvironmentEvalCallback(env, trainer, every=2, num_prompts=2, num_samples=2))
    trainer.add_callback(CostCallback(trainer))
    trainer.train()
    args = SNRFilteredGRPOConfig(**{**settings, "max_steps": 1, "snr_refill_rounds": 0, "snr_importance_weights": 5.0})
    lake = make_env("frozen_lake")
    weighted = SNRFilteredGRPOTrainer(resolve_model("tiny"), lake.reward_funcs, args, lake.dataset(16, seed=0))
    weighted.train()
    return {key for row in trainer.state.log_history + weighted.state.log_history for key in row}


def pattern(name: str) -> re.Pattern[str]:
    """`env/<task>/pass@<k>` stands for every task and k, `clip_ratio/*` for all that begins so."""
    return re.compile(re.sub(r"<\w+>", "[^/@]+", re.escape(name)).replace(r"\*", ".+"))


def documented(page: str) -> list[str]:
    """The keys in the first column of tables of metrics, with the prefixes that the table's head names."""
    found, prefixes = [], [""]
    for first, *_ in rows(page):
        if first.startswith("key"):
            prefixes = re.findall(r"`(mi/\w+/)`", first) or [""]
        elif first.startswith(("setting", "you see")):
            prefixes = []
        else:
            found += [
                prefix + name for prefix in prefixes for name in quoted(first) if re.fullmatch(r"[\w/@<>*]+", name)
            ]
    return found


def test_every_metric_that_is_logged_is_explained(logged):
    explained = [pattern(name) for name in documented("metrics.md")]
    ours = sorted(
        key for key in logged if key.startswith(("snr/", "mi/", "env/", "eval/", "grad/", "cost/", "reward_variance/"))
    )
    assert len(ours) > 80
    assert [key for key in ours if not any(one.fullmatch(key) for one in explained)] == []


def test_every_metric_that_is_explained_is_logged(logged):
    names = documented("metrics.md")
    assert len(names) > 80
    assert [name for name in names if not any(pattern(name).fullmatch(key) for key in logged)] == []


@pytest.mark.parametrize("page", ["../README.md", "metrics.md", "swap.md", "reporting.md", "distributed.md"])
def test_every_metric_that_is_named_is_logged(page, logged):
    """In running text, too, where the scope may be left out."""
    text = re.sub(r"```.*?```", "", PAGES[page].read_text(encoding="utf-8"), flags=re.DOTALL)
    known = logged | {key.split("/")[-1] for key in logged}
    named = {
        name
        for name in quoted(text)
        if re.fullmatch(r"(train/)?(snr|mi|env|grad|cost|clip_ratio|completions)/[\w/@<>*]+", name)
    }
    figures = {"train/mi/quadrant", "train/mi/cross_scores", "train/mi/reward_variance"}
    unknown = {
        name for name in named - figures if not any(pattern(name.removesuffix("/")).match(key) for key in known)
    }
    assert {name for name in unknown if not name.endswith((".parquet", "/"))} == set()


def groups_of(call: ast.Call) -> int:
    """Groups in a generation of the configuration that an example makes, on one process."""
    said = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
    rows = said.get("per_device_train_batch_size", 8) * said.get("gradient_accumulation_steps", 1)
    return said.get("generation_batch_size", rows) // said.get("num_generations", 2 if "RLOO" in call.func.id else 8)


def test_every_example_has_groups_to_rank_and_prompts_to_compare():
    """In one generation; but for the first one, which is to be short."""
    configs = [
        (page, node)
        for page in PAGES
        for script in scripts(page)
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "").startswith("SNRFiltered")
        if node.func.id.endswith("Config") and not any(word.arg is None for word in node.keywords)
    ]
    (shortest, _), *others = sorted(configs, key=lambda found: groups_of(found[1]))
    assert (shortest, len(others)) == ("../README.md", 6)
    assert all(groups_of(call) >= 8 for _, call in others)
    assert SNRFilteredGRPOConfig(use_cpu=True, bf16=False).ranks_in_window


def defaults_in(page: str, heading: str) -> dict[str, str]:
    """Setting -> default, of a table whose first cells name settings and whose second cells their defaults."""
    table = [(quoted(names), quoted(values)) for names, values, _ in rows(page, heading) if "`snr_" in names]
    return {name: value for names, values in table for name, value in zip(names, values, strict=True)}


def test_defaults_of_the_settings_are_those_of_the_tables():
    fields = SNRFilteredGRPOConfig.__dataclass_fields__
    whole = {name: str(field.default) for name, field in fields.items() if name.startswith("snr_")}
    assert defaults_in("swap.md", "All settings") == whole
    short = defaults_in("../README.md", "What the filter does")
    assert len(short) >= 8 and short.items() <= whole.items()


@pytest.mark.parametrize(("page", "count"), [("../README.md", 2), ("performance.md", 3)])
def test_tables_of_time_to_success_are_those_of_the_benchmark(page, count):
    tables = re.findall(r"^\| method \| 0 % impossible .*\n(?:\|.*\n)+", PAGES[page].read_text(encoding="utf-8"), re.M)
    measured = (ROOT / "benchmarks" / "results" / "time_to_success.md").read_text(encoding="utf-8")
    assert len(tables) == count
    assert [table for table in tables if table not in measured] == []


RESULTS = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
SECTION = (
    PAGES["../README.md"].read_text(encoding="utf-8").partition("\n## Does it hold?")[2].partition("\n[SmolLM2]")[0]
)
BULLETS = {
    re.search(r"results/README\.md#(\w+)", bullet)[1]: " ".join(bullet.split()) for bullet in SECTION.split("\n- ")[1:]
}
NUMBER = r"([-+]?\d+(?:\.\d+)?)"
INTERVAL = rf"\((?:95 % interval )?{NUMBER} to {NUMBER}"
FALLS = re.compile(r"\b(behind|below|falls|later)\b")


def test_the_readme_tells_every_claim_that_has_all_its_runs():
    rows = re.findall(r"^\| \[(\w+)\]\(#.*\*\*([^*]+)\*\* \|", RESULTS, re.M)
    assert BULLETS.keys() == {
        claim for claim, verdict in rows if "so far" not in verdict and CURVES_ONLY not in verdict
    }


@pytest.mark.parametrize("claim", BULLETS)
def test_a_bullet_of_the_readme_says_what_the_results_say(claim):
    """Its verdict, and each number that has an interval: as the results have it, or, where something is said to be
    behind or to fall, with the other sign."""
    section = RESULTS.partition(f"\n## {claim}\n")[2].partition("\n## ")[0]
    verdict = re.search(r"^\*\*(.+?)\.\*\*", section, re.M)[1]
    assert f"**{verdict.lower()}**" in BULLETS[claim].lower()
    found = re.findall(rf"{NUMBER}(?: points| times| %)? {INTERVAL}\)", section)
    measured = [tuple(map(float, numbers)) for numbers in found]
    said = re.findall(rf"([^.;:]*?){NUMBER}((?: %| points)?[^()\d]*?)\s?{INTERVAL}", BULLETS[claim])
    assert said
    for before, estimate, after, low, high in said:
        numbers = [float(estimate), float(low), float(high)]
        if FALLS.search(before.rpartition(")")[2] + after):
            numbers = [-numbers[0], -numbers[2], -numbers[1]]
        half = 0.5 / 10 ** len(low.partition(".")[2]) + 1e-9
        near = [there for there in measured if np.allclose(numbers, there, rtol=0, atol=half)]
        assert near, (estimate, low, high)


REFUSED = [(quoted(setting)[0], quoted(message)[0]) for setting, message in rows("swap.md", "What is refused")[1:]]


@pytest.mark.parametrize(("setting", "message"), REFUSED)
def test_a_setting_is_refused_as_the_guide_says(setting, message, tmp_path):
    settings = {word.arg: ast.literal_eval(word.value) for word in ast.parse(f"f({setting})").body[0].value.keywords}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        SNRFilteredGRPOConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False} | settings)


def test_settings_in_running_text_exist():
    known = {*SNRFilteredGRPOConfig.__dataclass_fields__, *RLOOConfig.__dataclass_fields__}
    named = {name for page in PAGES for name in quoted(PAGES[page].read_text(encoding="utf-8"))}
    assert {name for name in named if re.fullmatch(r"snr_\w+", name)} <= known
    given = {word for name in named for word in re.findall(r"\b(snr_\w+)=", name)}
    assert given <= known
