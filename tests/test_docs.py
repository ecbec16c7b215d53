"""The guide to a task of one's own works as it is printed."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "your_own_environment.md"


def test_the_guide_to_an_environment_of_ones_own_runs_as_printed(monkeypatch):
    from ragen2_trl.envs import Environment

    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 8
    names: dict = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, GUIDE.name, "exec"), names)
    assert issubclass(names["Sum"], Environment)
    assert len(names["trainer"].state.log_history) > 0
