"""Credentials stay out of whatever is written, and hiding them is linear."""

import ast
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from growth import growth
from hypothesis import example, given
from hypothesis import strategies as st

import ragen2_trl
from ragen2_trl.cli.samples import save_rows
from ragen2_trl.reporting.files import write_json, write_text
from ragen2_trl.reporting.hub import push_dataset
from ragen2_trl.reporting.redaction import HIDDEN, hide_credentials, without_credentials
from ragen2_trl.reporting.settings import public

PACKAGE = Path(ragen2_trl.__file__).parent
LINE = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2028\u2029"), max_size=20)
WORD = st.text("abcXYZ0189-_", max_size=30)


@given(LINE, LINE, LINE, st.sampled_from(["http", "https", "postgres", "s3+x"]))
@example("someone", "pa/ss", "", "http")
@example("some one", "p@ss", "", "https")
@example("a", "p?a#ss", "?k=5#part", "http")
@example("", "://", "", "http")
def test_users_and_passwords_of_addresses_are_hidden(user, password, rest, scheme):
    secret = f"{user}UsEr:{password}SeCrEt{password}"
    for text in (
        f"corpus={scheme}://{secret}@host/retrieve{rest}",
        f"{scheme}://{secret}@host",
        f"see {scheme}://{secret}@h",
    ):
        for hidden in (hide_credentials(text), public(text), without_credentials([{"x": text}])[0]["x"]):
            assert "UsEr" not in hidden and "SeCrEt" not in hidden


@given(st.sampled_from(["hf_", "sk-", "sk-proj-", "ghp_", "github_pat_", "AKIA"]), WORD, LINE, LINE)
def test_tokens_are_hidden_by_their_form(prefix, body, before, after):
    token = f"{prefix}AbCdEf{body}"
    for text in (f"{before} {token} {after}", f"{before}={token}", f"key:'{token}'", token, f"{before}/{token}/"):
        assert "AbCdEf" not in hide_credentials(text)


@given(st.sampled_from(["token", "api_key", "API-KEY", "password", "access_token", "hub_token", "secret"]), WORD)
def test_values_are_hidden_by_their_names(name, body):
    value = f"VaLuE{body}"
    for text in (f"{name}={value}", f"?k=5&{name}={value}&x=1", f"http://h/p?{name}={value}", f"a {name}={value} b"):
        hidden = hide_credentials(text)
        assert "VaLuE" not in hidden and name in hidden
    assert "VaLuE" not in json.dumps(without_credentials({"a": [{name: value}]}))
    assert "VaLuE" not in public(f"http://host/search?anything={value}")


@pytest.mark.parametrize(
    "text",
    [
        "0.5 nats per token: 0.5, mi_token=0.25 and max_turn_tokens=400",
        "a task-specific sk-learn, hf_xet and risk-averse",
        "http://127.0.0.1:8000/retrieve?k=5&page=2#part",
        "me@example.org and then http://example.org",
        "@misc{a, url={https://arxiv.org/abs/2604.06268}}",
        "",
    ],
)
def test_other_text_stays_as_it_is(text):
    assert hide_credentials(text) == text


PIECES = [
    "://", "@", "a", "http://a:", "http://a:b@", "://\n", "@\n", "://@", "hf_", "hf_a", "sk-", "sk-sk", "gh", "AKIA",
    "token=", "token= ", "?key", "&key", "?a", "&", "?key=", "password:", "password", "api_", "api-key", "bearer ",
    "xox", "_", "-", ".", " ",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES)
def test_hiding_is_linear_in_the_text(piece):
    assert growth(hide_credentials, lambda size: piece * size, 4000) < 24  # 8 times as much; the square would be 64
    assert growth(public, lambda size: f"http://{piece * size}", 4000) < 24


def test_files_hold_no_credentials(tmp_path):
    secret = "http://someone:pass/word@host/x and hf_abcdefghijkl"
    write_json(tmp_path / "a.json", {"env_args": [f"corpus={secret}"], "hub_token": "opaque", "step": 3})
    written = json.loads((tmp_path / "a.json").read_text())
    assert written == {"env_args": [f"corpus=http://{HIDDEN}@host/x and hf_{HIDDEN}"], "hub_token": HIDDEN, "step": 3}
    page = f'<a href="https://example.org">{secret}</a> me@example.org'
    write_text(tmp_path / "a.html", page)
    assert (tmp_path / "a.html").read_text() == (
        f'<a href="https://example.org">http://{HIDDEN}@host/x and hf_{HIDDEN}</a> me@example.org'
    )


# The writers that do not go through `files.py`: what programs say of themselves, indices, what torch writes, and a
# file that is gone when it has been read.
OTHERS = {
    "reporting/files.py",
    "envs/deepcoder",
    "envs/search_qa/retrieval.py",
    "trainers/processes.py",
    "cli/typed.py",
}


def test_every_writer_of_text_goes_through_one_function():
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if any(name.startswith(other) for other in OTHERS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                is_method = isinstance(node.func, ast.Attribute)
                called = node.func.attr if is_method else getattr(node.func, "id", "")
                own_way = called in ("write_text", "write_bytes", "dump") if is_method else called == "open"
                assert not own_way, f"{name}:{node.lineno} writes by itself"
                if called == "save" and isinstance(node.func, ast.Attribute):
                    assert getattr(node.func.value, "id", "") != "card", f"{name}:{node.lineno} writes by itself"


def test_completions_of_a_diagnosis_are_saved_without_credentials(tmp_path):
    ids = {"prompt_ids": [1, 2], "completion_ids": [3]}
    text = "see http://user:VaLuE@host/ and hf_VaLuEVaLuE"
    save_rows(
        [{"prompt": text, "completion": [{"role": "assistant", "content": text}], **ids}], tmp_path / "rows.parquet"
    )
    (row,) = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert "VaLuE" not in str(row) and HIDDEN in row["prompt"] and {name: row[name] for name in ids} == ids


def test_tasks_that_name_a_folder_of_this_machine_are_not_pushed(tmp_path):
    class Shop:
        def dataset(self, number, seed, split, data):
            return Dataset.from_list([{"seed": seed, "catalogue": data}])

    with pytest.raises(ValueError, match=r"stands in each of its tasks .catalogue., which nobody else could play"):
        push_dataset(Shop(), "me/tasks", data=str(tmp_path))
