"""Packages that single tasks need: what is missing is named with its extra, and only by the task that needs it."""

import subprocess
import sys

import pytest

from ragen2_trl import cli
from ragen2_trl.envs import make_env
from ragen2_trl.envs.search_qa.passages import Passage
from ragen2_trl.envs.search_qa.retrieval import BM25Retriever, open_corpus


@pytest.mark.parametrize(
    ("name", "options", "module", "package"),
    [
        ("search_qa", {"multi_turn": True}, "bm25s", "bm25s"),
        ("search_qa", {"preset": "ragen2"}, "bm25s", "bm25s"),
        ("search_qa", {"multi_turn": True, "corpus": "http://127.0.0.1:9"}, "httpx", "httpx"),
        ("webshop", {}, "bm25s", "bm25s"),
        ("webshop", {"preset": "ragen2"}, "rapidfuzz", "rapidfuzz"),
    ],
)
def test_a_task_names_the_package_and_the_extra_that_it_misses(monkeypatch, name, options, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    extra = name.replace("_", "-")
    with pytest.raises(ImportError, match=rf"{name} needs {package}, .*ragen2-trl\[{extra}\]"):
        make_env(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "module"),
    [
        ("search_qa", {}, "bm25s"),  # a closed book
        ("search_qa", {"multi_turn": True, "corpus": "http://127.0.0.1:9"}, "bm25s"),  # a server searches
    ],
)
def test_what_a_task_does_not_use_is_not_asked_for(monkeypatch, name, options, module):
    monkeypatch.setitem(sys.modules, module, None)
    assert make_env(name, **options).dataset(1)


def test_an_index_names_the_extra_too(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    passages = tmp_path / "passages.jsonl"
    passages.write_text('{"title": "Osk", "text": "A river."}\n')
    with pytest.raises(ImportError, match=r"search_qa needs bm25s, .*ragen2-trl\[search-qa\]"):
        open_corpus(str(passages), tmp_path / "cache")
    with pytest.raises(ImportError, match=r"ragen2-trl\[search-qa\]"):
        BM25Retriever.build([Passage("Osk", "A river.")])


def test_the_other_tasks_need_none_of_them():
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['bm25s', 'rapidfuzz']))\n"
        "from ragen2_trl.envs import make_env\n"
        "for name in ('bandit', 'countdown', 'frozen_lake', 'metamath_qa', 'sokoban'):\n"
        "    make_env(name).dataset(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_line_says_it_in_a_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["evaluate", "--model", "random", "--env_name", "webshop"])
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    assert "ragen2-trl evaluate: webshop needs rapidfuzz" in said and "ragen2-trl[webshop]" in said
