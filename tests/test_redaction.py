"""Credentials stay out of whatever is written, and hiding them is linear."""

import ast
import copy
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from growth import growth
from trl import GRPOTrainer

import ragen2_trl
from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOTrainer
from ragen2_trl.callbacks.run_record import keep_record
from ragen2_trl.cli.samples import save_rows
from ragen2_trl.record.files import write_json, write_text
from ragen2_trl.record.settings import public
from ragen2_trl.redaction import HIDDEN, hide_credentials, without_credentials

PACKAGE = Path(ragen2_trl.__file__).parent
OPAQUE = "VaLuE-_0x9"
LETTERS, HEX = "aBcDeFgHiJkLmNoPqRsTuVwXyZAbCdEfGhIjKlMnOpQrStUvWxYz" * 3, "0123456789abcdef" * 2
# Texts with a credential, and the part of it that nobody may see.
ADDRESSES = {
    f"{before}{scheme}://{user}:{password}@host{rest}": part
    for scheme, user, password, part in [
        ("http", "UsEr", "SeCrEt", "SeCrEt"),
        ("https", "UsEr", "x", "UsEr"),
        ("postgres", "some UsEr", "x", "UsEr"),
        ("s3+x", "someone", "pa/ssSeCrEt", "SeCrEt"),
        ("https", "some one", "p@SeCrEt@ss", "SeCrEt"),
        ("http", "a", "p?a#SeCrEt", "SeCrEt"),
        ("http", "", "://SeCrEt", "SeCrEt"),
        ("http", "ünï", "a:b:SeCrEt", "SeCrEt"),
    ]
    for before, rest in (("corpus=", "/retrieve?k=5#part"), ("", ""), ("see ", " and http://other"))
}
TOKENS = {
    writing.format(token): token[8:]
    for token in (
        f"hf_{LETTERS[:34]}",
        f"sk-{LETTERS[:46]}7A",
        f"sk-{HEX}",
        f"sk-proj-7_-{LETTERS[:150]}",
        f"sk-ant-api03-7_-{LETTERS[:90]}",
        f"ghp_7{LETTERS[:35]}",
        f"github_pat_7_{LETTERS[:80]}",
        f"glpat-7_-{LETTERS[:17]}",
        f"xoxb-7-{LETTERS[:48]}",
        "AKIAABCDEFGH2345IJKL",
        f"AIza7_-{LETTERS[:32]}",
    )
    for writing in ("before {} after", "before={}", "key:'{}'", "{}", "before/{}/")
}
NAMES = ["token", "api_key", "API-KEY", "password", "access_token", "hub_token", "secret", "wandb_api_key"]
NAMES += ["WANDB_API_KEY", "openai-api-key", "vllm.apiKey", "db_password", "aws_secret_access_key"]
NAMED = {
    writing.format(name, OPAQUE): OPAQUE
    for name in NAMES
    for writing in ("{}={}", "?k=5&{}={}&x=1", "http://h/p?{}={}", "a {}={} b")
}


@pytest.mark.parametrize(("text", "part"), {**ADDRESSES, **TOKENS, **NAMED, f"http://h/s?any={OPAQUE}": ""}.items())
def test_no_credential_is_in_what_is_shown_or_written(text, part, tmp_path):
    write_json(tmp_path / "a.json", {text: [text], "step": 3})
    write_text(tmp_path / "a.html", f"<p>{text}</p>")
    written = [(tmp_path / name).read_text() for name in ("a.json", "a.html")]
    hidden = hide_credentials(text)
    told = json.dumps(without_credentials({text: [{"x": text}]}))
    assert not part or [one for one in (hidden, told, *written) if part in one] == []
    assert (part or OPAQUE) not in public(text)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_hidden_by_their_names(name, tmp_path):
    write_json(tmp_path / "a.json", {"a": [{name: OPAQUE, "hf_home": OPAQUE, "step": 3}]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [{name: HIDDEN, "hf_home": OPAQUE, "step": 3}]}
    assert name in hide_credentials(f"{name}={OPAQUE}")


@pytest.mark.parametrize(
    "text",
    [
        "0.5 nats per token: 0.5, mi_token=0.25 and max_turn_tokens=400",
        "a task-specific sk-learn, hf_xet and risk-averse",
        "/home/me/hf_workspace/runs, /data/sk-experiments/sk-experiments-with-a-long-name-of-a-folder/x",
        "ghs_town, github_pat_terns, glpat-h, xoxb-ox, AKIAtsuki, AIzawa/AIzawa_and_others",
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


def test_markup_around_a_credential_stays(tmp_path):
    secret = f"http://someone:pass/word@host/x and hf_{LETTERS[:36]}"
    write_text(tmp_path / "a.html", f'<a href="https://example.org">{secret}</a> me@example.org')
    assert (tmp_path / "a.html").read_text() == (
        f'<a href="https://example.org">http://{HIDDEN}@host/x and hf_{HIDDEN}</a> me@example.org'
    )


# The writers that do not go through `files.py`: what programs say of themselves, indices, what torch writes, the names
# of its files, and a file that is gone when it has been read.
OTHERS = {
    "record/files.py",
    "envs/deepcoder",
    "envs/search_qa/retrieval.py",
    "trainers/processes.py",
    "trainers/checkpoints.py",
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
    text = f"see http://user:VaLuE@host/ and hf_{'VaLuE' * 7}"
    save_rows(
        [{"prompt": text, "completion": [{"role": "assistant", "content": text}], **ids}], tmp_path / "rows.parquet"
    )
    (row,) = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert "VaLuE" not in str(row) and HIDDEN in row["prompt"] and {name: row[name] for name in ids} == ids


SECRET_ARGUMENTS = {
    "vllm_server_base_url": "http://me:VaLuE@host:8000",
    "generation_kwargs": {"api_key": "VaLuE", "min_p": 0.1},
    "model_init_kwargs": {"token": "VaLuE"},
    "hub_token": "VaLuE",
    "run_name": f"of hf_{'VaLuE' * 7}",
}


@pytest.mark.parametrize("snr", [True, False], ids=["ours", "stock"])
def test_no_argument_with_a_credential_is_saved_or_sent_to_trackers(snr, policy_path, make_args, prompts, tmp_path):
    """And whoever asks in the process, such as a client of vLLM, has it."""
    given = {name: value for name, value in SECRET_ARGUMENTS.items() if name != "generation_kwargs"}
    args = make_args(snr, max_steps=1, save_strategy="steps", save_steps=1, report_to="tensorboard", **given)
    trainer = (SNRFilteredGRPOTrainer if snr else GRPOTrainer)(policy_path, length, args, prompts)
    trainer.args.generation_kwargs = SECRET_ARGUMENTS["generation_kwargs"]  # which this model would not take
    MutualInformationCallback(trainer)
    keep_record(trainer).draws = False
    trainer.train()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any("tfevents" in path.name for path in files)
    assert [path.name for path in files if "VaLuE" in path.read_bytes().decode(errors="replace")] == []
    copies = (trainer.args, copy.copy(trainer.args), copy.deepcopy(trainer.args))
    assert all(getattr(one, name) == value for one in copies for name, value in SECRET_ARGUMENTS.items())
    assert "VaLuE" not in str(trainer.args) and "VaLuE" not in trainer.args.to_json_string()
    saved = torch.load(tmp_path / "run" / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert type(saved) is type(args) and saved.generation_kwargs == {"api_key": HIDDEN, "min_p": 0.1}
    kept = {name for name, value in vars(args).items() if vars(saved)[name] == value}
    # The default of pilots is for a trainer to say.
    assert vars(args).keys() - kept <= {*SECRET_ARGUMENTS, "distributed_state", "snr_pilot_generations"}


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]
