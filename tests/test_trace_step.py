"""The script that prints the path of a training step through the core."""

import pytest

from scripts.trace_step import CORE, main, stays_of


def test_a_stay_is_named_by_its_first_call_and_a_loop_counts_once():
    calls = [(file, str(number)) for number, file in enumerate("aabcbcbca")]
    assert stays_of(calls) == [("a", "0"), ("b", "2"), ("c", "3"), ("a", "8")]


@pytest.mark.slow
def test_a_step_is_traced_from_its_batch_to_its_loss_in_the_core_alone(capsys):
    main("top_p")
    path, numbers = capsys.readouterr().out.splitlines()[-2:]
    stays = [stay.split(":") for stay in path.split(" > ")]
    assert stays[0] == ["trainers/filtered", "_prepare_inputs"]
    assert all(f"{file}.py".startswith(CORE) for file, _ in stays)
    files = len({file for file, _ in stays})
    assert numbers.startswith(f"top_p: stays {len(stays)}, files {files}, functions ")


def test_an_unknown_mode_is_refused():
    with pytest.raises(SystemExit, match="mode='bottom_p' is not supported; allowed: top_p, lossless, all_in"):
        main("bottom_p")
