"""The filter for system calls, run as the kernel would, for each architecture; test_attacks.py asks the kernel."""

import errno
import functools
import struct
from pathlib import Path

import pytest
import yaml

from ragen2_trl.envs.deepcoder.sandbox_syscalls import ARCHITECTURES, allowed_calls, seccomp_filter

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
REFUSALS = {0x50000 | number for number in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)}
FILES = ("system_calls.yaml", "arguments.yaml")
CALLS = [call for name in FILES for call in yaml.safe_load((Path(__file__).parent / "attacks" / name).read_text())]


@functools.cache
def steps_of(machine):
    return list(struct.iter_unpack("HBBI", seccomp_filter(machine)))


def answer(machine, number, arguments=(0,) * 6, architecture=None):
    """What the filter says to a call: classic BPF over the kernel's `struct seccomp_data`."""
    steps = steps_of(machine)
    given = [*arguments, *[0] * (6 - len(arguments))]
    architecture = ARCHITECTURES[machine][0] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(value % 2**64 for value in given))
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, operand = steps[at]
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x06:
            return operand
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand}[operation]
            at += if_true if holds else if_false
        at += 1


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_attack_by_a_system_call_is_refused(machine):
    calls = [call for call in CALLS if machine in call]
    assert len(calls) > 150
    assert [call for call in calls if answer(machine, call[machine], call.get("arguments", ())) not in REFUSALS] == []


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 56), ("aarch64", 220)])
def test_threads_can_be_started_and_processes_cannot(machine, number):
    for flags in (0x3D0F00, 0x7D0F00):  # as glibc does, as musl does
        assert answer(machine, number, [flags]) == ALLOWED
        for bit in (1 << position for position in range(32) if position != 22):
            assert answer(machine, number, [flags ^ bit]) in REFUSALS
    assert answer(machine, 435) == 0x50000 | errno.ENOSYS  # clone3: the C library falls back to clone


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_of_other_architectures_end_the_program(machine):
    for other in (0x40000003, 0x40000028, 0):  # 32-bit x86 and ARM
        assert answer(machine, 1, architecture=other) == KILLED
    if machine == "x86_64":
        assert answer(machine, 0x40000000 | 39) == KILLED  # x32


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_is_on_no_list_is_refused_whatever_its_number(machine):
    passed = [number for number in range(1500) if answer(machine, number, [2**32 - 1] * 6) == ALLOWED]
    assert len(passed) <= len(allowed_calls(machine))
    assert not [number for number in range(437, 1500) if number != 439 and answer(machine, number) == ALLOWED]


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_a_filter_fits_the_kernel(machine):
    assert len(seccomp_filter(machine)) // 8 <= 4096  # BPF_MAXINSNS
