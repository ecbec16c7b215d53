"""Every setting of the filter that a page, a message, a recipe or an experiment names is one that a config has."""

import re
from pathlib import Path

import pytest

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredPPOConfig, SNRFilteredRLOOConfig
from ragen2_trl.filtering import SCORES
from ragen2_trl.trainers.config import STRATEGIES
from research.settings import STORED_NAMES, STORED_VALUES

ROOT = Path(__file__).parents[1]
CONFIGS = (SNRFilteredGRPOConfig, SNRFilteredRLOOConfig, SNRFilteredPPOConfig)
FIELDS = {name for config in CONFIGS for name in config.__dataclass_fields__}
# Files of a checkpoint, columns of a batch and the like.
NO_SETTINGS = {"snr_state_", "snr_manifest", "snr_fields", "snr_kept", "snr_shared_tokens", "snr_tag"}
STORED = {*STORED_NAMES.values(), *(name for of in STORED_VALUES.values() for own in of.values() for name in own)}
# Pages and experiments that speak of stored runs, by the names that these have.
FURTHER = {
    "research/README.md": {*STORED, "snr_mode"},
    "research/experiments/ours1.yaml": {"snr_mode"},
    "research/experiments/ours2.yaml": {"snr_mode"},
}
FILES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")),
    *sorted((ROOT / "examples").glob("*.py")),
    *(path for folder, suffix in (("docs", "md"), ("ragen2_trl", "py"), ("ragen2_trl", "yaml"), ("scripts", "*"))
      for path in sorted((ROOT / folder).rglob(f"*.{suffix}")) if "__pycache__" not in path.parts),
    ROOT / "research" / "README.md",
    *sorted((ROOT / "research" / "experiments").rglob("*.yaml")),
]  # fmt: skip
NAMED = [path.relative_to(ROOT).as_posix() for path in FILES if "snr_" in path.read_text()]


@pytest.mark.parametrize("name", NAMED)
def test_settings_scores_and_strategies_that_a_file_names_exist(name):
    """As `snr_strategy="top_p"` in Python, `snr_strategy: top_p` in YAML and `--snr_strategy top_p` in a shell."""
    text = (ROOT / name).read_text()
    words = set(re.findall(r"\bsnr_[a-z]\w*", text))
    assert words - NO_SETTINGS - FURTHER.get(name, set()) <= FIELDS
    if name in FURTHER:  # its table has the store's values, too
        text = re.sub(r"^\| .*", "", text, flags=re.MULTILINE)
    for setting, allowed in (("snr_score", SCORES), ("snr_strategy", STRATEGIES)):
        said = re.findall(rf"{setting}(?:[\"']?: ?[\"']?|=[\"'])([a-z]\w*)", text)
        said += re.findall(rf"--{setting} (\w+)", text)
        assert set(said) - {"str"} <= set(allowed)
