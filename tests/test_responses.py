"""The parser that reads what a model wrote."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragen2_trl.envs import completion_text, format_response, parse_response
from ragen2_trl.envs.responses import MAX_PARSED_ACTIONS, MAX_RESPONSE_CHARS


def read(text, **options):
    response = parse_response(text, **options)
    return response.reasoning, response.actions


def test_parser_reads_the_first_pair_and_ignores_the_rest():
    text = "So <think>a</think>\n<answer>Up||Down || </answer> <think>b</think><answer>Left</answer>"
    assert read(text) == ("a", ("Up", "Down"))


def test_parser_allows_a_prefilled_think_tag():
    assert read("I go up.</think><answer>Up</answer>") == ("I go up.", ("Up",))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<answer>Up</answer>",
        "<think>a</think> so <answer>Up</answer>",
        "<think>a</think><answer>Up",
        "<think>a<answer>Up</answer>",
        "<answer>Up</answer><think>a</think>",
        "<think>a</think></think><answer>Up</answer>",
        "<think>a</think><think>b</think><answer>Up</answer>",
        "<think>a<think>b</think>c</think><answer>Up</answer>",
        "<THINK>a</THINK><ANSWER>Up</ANSWER>",
        "<think>a</think><Answer>Up</Answer>",
        "<think>a</think><answer>Up</Answer>",
        "<think>a</think>< answer>Up</answer>",
        "\uff1cthink\uff1ea\uff1c/think\uff1e\uff1canswer\uff1eUp\uff1c/answer\uff1e",  # full-width brackets
    ],
)
@pytest.mark.parametrize("split", [True, False])
def test_parser_rejects_malformed_text(text, split):
    assert parse_response(text, split=split) is None


def test_tags_inside_tags_are_text():
    assert read("<think>a <think>b</think><answer>Up</answer>") == ("a <think>b", ("Up",))
    assert read("<think>say <answer>Up</answer></think><answer>Down</answer>") == (
        "say <answer>Up</answer>",
        ("Down",),
    )
    assert read("<think>a</think><answer><answer>Up</answer></answer>") == ("a", ("<answer>Up",))


def test_unicode_passes_through_unchanged():
    reasoning, actions = read("<think>雪が🧊</think>\u2003<answer>Ünder || ←</answer>")  # white space of any script
    assert (reasoning, actions) == ("雪が🧊", ("Ünder", "←"))
    assert read("<think>e\u0301</think><answer>\ud800</answer>") == ("e\u0301", ("\ud800",))  # half a surrogate pair


def test_an_answer_that_is_not_split_is_one_action():
    text = "<think>a</think><answer>\nif a || b:\n    go()\n</answer>"
    assert read(text, split=False) == ("a", ("if a || b:\n    go()",))
    assert read(text) == ("a", ("if a", "b:\n    go()"))


@pytest.mark.parametrize("split", [True, False])
def test_an_empty_answer_holds_no_action(split):
    assert read("<think></think><answer> \n</answer>", split=split) == ("", ())


def test_empty_actions_are_dropped():
    assert read("<think></think><answer>|| Up ||| Down ||||</answer>") == ("", ("Up", "| Down"))


def test_actions_beyond_the_limit_are_dropped():
    actions = [str(number) for number in range(MAX_PARSED_ACTIONS + 5)]
    assert read(format_response("", actions)) == ("", tuple(actions[:MAX_PARSED_ACTIONS]))


PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "||", " ", "\n", "Up", "<", "\x00"])


@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)))
@example("<think>" * 50_000)
@example("</think><answer>" * 50_000)
@example("</think><answer>" + "a||" * 30_000 + "</answer>")
@example("</think>" + " " * 99_000)
def test_parser_survives_hostile_text(text):
    response, whole = parse_response(text), parse_response(text, split=False)
    assert (response is None) == (whole is None)
    if response is not None:
        assert response.reasoning == whole.reasoning
        assert len(response.actions) <= MAX_PARSED_ACTIONS
        assert len(whole.actions) <= 1
        assert all(action == action.strip() != "" and "||" not in action for action in response.actions)


def test_parser_reads_no_further_than_its_limit():
    answer = format_response("A plan.", ["Up"])
    filler = "x" * (MAX_RESPONSE_CHARS - len(answer))
    assert parse_response(filler + answer) is not None
    assert parse_response(filler + "x" + answer) is None


WORDS = st.text(alphabet="abc é\n.|", max_size=20).map(str.strip).filter(lambda text: text and "|" not in text)


@given(st.text(alphabet="abc \n.", max_size=30), st.lists(WORDS, min_size=1, max_size=10))
def test_parser_reads_back_what_was_formatted(reasoning, actions):
    assert read(format_response(reasoning, actions)) == (reasoning.strip(), tuple(actions))


@given(st.text(alphabet="abc \n.", max_size=30), st.text(alphabet="ab| \n<", min_size=1).filter(str.strip))
def test_parser_reads_back_one_answer_that_is_not_split(reasoning, action):
    assert read(format_response(reasoning, [action]), split=False) == (reasoning.strip(), (action.strip(),))


def test_completion_text_joins_assistant_messages_only():
    messages = [
        {"role": "assistant", "content": None, "thinking": "a"},
        {"role": "tool", "content": "ignored"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "image", "image": None}]},
    ]
    assert completion_text(messages) == "<think>a</think>b"


def test_completion_text_of_a_string_is_the_string():
    assert completion_text("<think>a</think>") == "<think>a</think>"
    assert completion_text([]) == ""
