"""`evaluate --model openai:NAME`: it plays, what goes wrong is one line, and the key is nowhere."""

import json
import logging

import pytest
from conftest import need
from endpoints import KEY, SECRET_PATH, completion, cut_off, endless, html, says, slow, status
from endpoints import endpoint_fixture as endpoint_fixture

from ragen2_trl import cli
from ragen2_trl.cli import endpoint as endpoint_module
from ragen2_trl.envs import format_response
from ragen2_trl.reporting.saved_episodes import read_episodes

pytestmark = pytest.mark.slow

need("openai")


def evaluate(folder, *options):
    command = ["evaluate", "--model", "openai:some/model", "--episodes", str(folder / "played"), "--timeout", "20"]
    cli.main(
        [*command, "--output", str(folder / "metrics.json"), "--num_prompts", "3", "--num_samples", "2", *options]
    )


def failed(capsys, folder, *options):
    """The line that a command ends with."""
    with pytest.raises(SystemExit) as ended:
        evaluate(folder, *options)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("ragen2-trl evaluate: ") and "Traceback" not in said
    return " ".join(said.split())


def played(folder):
    path = folder / "played" / "evaluation_00000.parquet"
    return read_episodes(path) if path.exists() else []


@pytest.mark.parametrize("multi_turn", [False, True])
def test_it_plays_what_the_endpoint_answers(endpoint, tmp_path, multi_turn, capsys):
    evaluate(tmp_path, "--multi_turn", str(multi_turn), "--temperature", "0.5", "--max_turn_tokens", "77")
    metrics, episodes = json.loads((tmp_path / "metrics.json").read_text()), played(tmp_path)
    assert len(episodes) == 6 and metrics["success"] == sum(one.success for one in episodes) / 6
    assert metrics["turns"] == len(endpoint.requests) / 6
    assert (metrics["turns"] > 1) == multi_turn
    for path, headers, body in endpoint.requests:
        assert path.endswith("/v1/chat/completions") and headers["Authorization"] == f"Bearer {KEY}"
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("some/model", 0.5, 77)
        assert body["messages"][0]["role"] == "system" and body["messages"][-1]["role"] == "user"
    longest = max(endpoint.requests, key=lambda request: len(request[2]["messages"]))[2]["messages"]
    (same,) = [one for one in episodes if one.messages[: len(longest)] == longest][:1]
    assert same.turns[0].actions == ["Right", "Down"]
    assert "openai:some/model on held-out frozen_lake" in " ".join(capsys.readouterr().out.split())


def test_episodes_are_played_side_by_side_and_no_more_of_them(endpoint, tmp_path):
    evaluate(tmp_path, "--multi_turn", "true", "--concurrency", "2")
    assert 1 <= endpoint.most_at_once <= 2


def test_reasoning_that_the_server_took_out_is_put_back(endpoint, tmp_path):
    endpoint.faults = [says(completion("<answer>Up</answer>", reasoning_content="Hm."))] * 6
    evaluate(tmp_path)
    assert {one.turns[0].valid for one in played(tmp_path)} == {True}


def test_what_passes_is_tried_again(endpoint, tmp_path):
    endpoint.faults = [status(429), status(500), status(503), cut_off]
    evaluate(tmp_path, "--concurrency", "1")
    assert len(played(tmp_path)) == 6 and len(endpoint.requests) == 10


def test_a_model_that_wants_the_other_name_of_the_limit_gets_it(endpoint, tmp_path):
    wrong = {"error": {"message": "Unsupported parameter: use 'max_completion_tokens' instead."}}
    endpoint.faults = [lambda handler: handler.send(wrong, 400)]
    evaluate(tmp_path, "--concurrency", "1")
    assert [request[2].get("max_completion_tokens") for request in endpoint.requests] == [None] + [1024] * 6


NULL = completion(None)
GARBAGE = {
    "html": (html, "answered in another form than choices[0].message.content with a text: JSONDecodeError"),
    "no choices": (says({"id": "x"}), "KeyError"),
    "empty choices": (says({"choices": []}), "IndexError"),
    "null": (says(NULL), "ValueError"),
    "a number": (says(completion(7)), "TypeError"),
    "a list": (says([1]), "TypeError"),
    "nested": (says(b"[" * 100_000), "another form"),
    "huge": (endless, "answered with more than 4,000,000 bytes"),
    "refused": (status(400), "refused with status 400: Error code: 400"),
    "unknown": (status(404), "refused with status 404"),
    "no key": (status(401), "refused with status 401: look at OPENAI_API_KEY"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_one_line_and_what_was_played_stays(endpoint, tmp_path, capsys, kind):
    fault, said = GARBAGE[kind]
    good = lambda handler: handler.send(completion(format_response("", ["Up"])))  # noqa: E731
    endpoint.faults = [good, good, fault]
    line = failed(capsys, tmp_path, "--concurrency", "1")
    assert "the endpoint of OPENAI_BASE_URL" in line and said in line
    assert "2 of 6 episodes were played and are in" in line
    assert str(tmp_path / "played") in line.replace(" ", "")
    assert len(played(tmp_path)) == 2 and not (tmp_path / "metrics.json").exists()


def test_errors_that_last_end_after_as_many_tries(endpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(endpoint_module, "RETRIES", 1)
    endpoint.faults = [status(503)] * 2
    assert "refused with status 503" in failed(capsys, tmp_path, "--concurrency", "1")
    assert len(endpoint.requests) == 2
    endpoint.faults = [slow] * 9
    line = failed(capsys, tmp_path, "--concurrency", "1", "--timeout", "1")
    assert "gave no answer within 1 s in 2 tries" in line
    endpoint.faults = [cut_off] * 9
    assert "broke off its answer in 2 tries: " in failed(capsys, tmp_path, "--concurrency", "1")


def test_nobody_there_is_one_line(endpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(endpoint_module, "RETRIES", 0)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert "cannot be reached in 1 tries: ConnectError" in failed(capsys, tmp_path)


@pytest.mark.parametrize("error", [None, 400, 401, 500])
def test_key_and_address_are_nowhere(endpoint, tmp_path, capsys, caplog, monkeypatch, error):
    monkeypatch.setattr(endpoint_module, "RETRIES", 0)
    endpoint.answer = lambda messages: format_response(f"Bearer {KEY}", [KEY, "Up"])
    endpoint.faults = [] if error is None else [status(error)]
    with caplog.at_level(logging.DEBUG):
        if error is None:
            evaluate(tmp_path)
            said = capsys.readouterr()
            said = said.out + said.err
        else:
            said = failed(capsys, tmp_path)
    logged = "".join(record.getMessage() + str(record.__dict__) for record in caplog.records)
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    texts = str(played(tmp_path))
    for secret in (KEY, SECRET_PATH):
        assert secret not in said and secret not in logged and secret not in texts
        assert secret.encode() not in files


@pytest.mark.parametrize(
    ("variables", "options", "said"),
    [
        ({"OPENAI_API_KEY": "", "OPENAI_BASE_URL": ""}, [], "OPENAI_API_KEY must be set"),
        ({"OPENAI_API_KEY": f"{KEY}\n{KEY}"}, [], "OPENAI_API_KEY must be printable ASCII"),
        ({"OPENAI_BASE_URL": f"http://user:{KEY}@host/v1"}, [], "OPENAI_BASE_URL must be an address alone"),
        ({"OPENAI_BASE_URL": f"http://host/v1?key={KEY}"}, [], "OPENAI_BASE_URL must be an address alone"),
        ({"OPENAI_BASE_URL": f"{KEY}"}, [], "OPENAI_BASE_URL must be http://host/v1"),
        ({}, ["--model", "openai:"], "model must name one of the endpoint's"),
        ({}, ["--max_new_tokens", "9"], "max_new_tokens must be None with openai:NAME"),
        ({}, ["--context", "last"], "context must be 'full' with openai:NAME, which is sent all turns, got 'last'"),
        ({}, ["--drop_oldest_turns", "true"], "drop_oldest_turns must be False with openai:NAME"),
        ({}, ["--concurrency", "0"], "concurrency must be between 1 and 1024, got 0"),
        ({}, ["--timeout", "0"], "timeout must be between 1 and 3600, got 0"),
        ({}, ["--temperature", "-1"], "temperature must be at least 0, got -1.0"),
        ({}, ["--num_prompts", "1"], "num_prompts must be at least 2, got 1"),
        ({}, ["--env_args", "observation=image"], "env must be text"),
    ],
)
def test_bad_settings_are_told_before_anything_is_asked(
    endpoint, tmp_path, capsys, monkeypatch, variables, options, said
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = failed(capsys, tmp_path, *options)
    assert said in line and KEY not in line
    assert endpoint.requests == []


def test_episodes_of_an_earlier_evaluation_are_not_overwritten(endpoint, tmp_path, capsys):
    evaluate(tmp_path)
    count = len(endpoint.requests)
    assert "holds evaluation_00000.parquet of an earlier evaluation" in failed(capsys, tmp_path)
    assert len(endpoint.requests) == count


def test_halves_of_characters_go_back_to_the_endpoint_as_something_else(endpoint, tmp_path):
    endpoint.faults = [lambda handler: handler.send(rb'{"choices": [{"message": {"content": "\ud800"}}]}')] * 6
    evaluate(tmp_path, "--multi_turn", "true")
    assert len(played(tmp_path)) == 6
