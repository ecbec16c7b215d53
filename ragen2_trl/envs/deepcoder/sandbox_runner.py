"""Runs inside the sandbox: as the guard of a run, and in a process below it as the program.

`sandbox.py` passes this file's text to `python -c`, so that no file of the package is visible inside. Its
arguments are two descriptors: of a JSON job, and of a file for the report. A job has `program` (text), `call` (None,
or a function's name and its arguments), `limits` (resource name → value) and `isolation`: None, or `inodes` of `/tmp`,
the `devices` in sight, the `user` to become, if any, and the `filter` for system calls in hexadecimal.

The guard is the first process of its namespace: whatever the program does, the kernel ends it with the guard, and the
guard with whoever started it. It has the program's user, at most, but none of its memory, files or signals can be
reached from below. Its report is JSON: the program's `exit_status`, or the `signal` that ended it, and `cpu_seconds`;
or what has `failed` before it began.

A job without a call is the program as a script. A job with a call prints what the function returns as JSON on stdout;
what the program itself prints goes to stderr.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 4, 22, 2
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
CLONE_NEWUSER = 0x10000000


class Steps(ctypes.Structure):
    """The kernel's `struct sock_fprog`."""

    _fields_ = [("count", ctypes.c_ushort), ("steps", ctypes.c_char_p)]


def kernel(name: str, *arguments: Any) -> None:
    """Call a function of the C library that returns -1 where it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def drop_capabilities() -> None:
    version_3 = ctypes.c_uint32 * 2
    kernel("capset", version_3(0x20080522, 0), (ctypes.c_uint32 * 6)())


def seal(isolation: dict[str, Any]) -> None:
    """What is to be done to the namespaces, and to the guard, before there is a program."""
    with open("/proc/self/oom_score_adj", "w") as score:  # where memory runs out, not the trainer
        score.write("1000")
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel("prctl", PR_SET_DUMPABLE, 0)  # nothing of /proc/1 can be opened that tells or changes something
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a namespace's first process does not get from within
    none, always = None, MS_REMOUNT | MS_NOSUID | MS_NODEV | MS_NOEXEC
    kernel("mount", none, b"/tmp", none, always, f"nr_inodes={isolation['inodes']}".encode())
    kernel("mount", none, b"/proc", none, always | MS_BIND | MS_RDONLY, none)
    for device in isolation["devices"]:  # inodes of the machine, whose time stamps would outlive the run
        read_only = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC
        kernel("mount", none, device.encode(), none, read_only, none)


def confine(isolation: dict[str, Any]) -> None:
    """Give up every right for good. The user namespace has no users, and the program's threads are counted in it."""
    user = isolation["user"]
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel("unshare", CLONE_NEWUSER)
    drop_capabilities()
    kernel("prctl", PR_SET_DUMPABLE, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def install(program: bytes) -> None:
    kernel("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(Steps(len(program) // 8, program)), 0, 0)


def guard(child: int, report: int) -> None:
    """Wait for the program and report how it ended; never returns."""
    os.closerange(0, 3)  # so that the streams end with the program
    _, status, usage = os.wait4(child, 0)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = None if number else os.WEXITSTATUS(status)
    if os.fstat(report).st_size == 0:
        write(report, {"exit_status": code, "signal": number, "cpu_seconds": usage.ru_utime + usage.ru_stime})
    os._exit(code or 0)


def write(report: int, values: dict[str, Any]) -> None:
    os.write(report, json.dumps(values).encode())


def begin(job: dict[str, Any], report: int) -> None:
    """Returns in the program's process alone, which then has nothing but its rights and limits."""
    isolation = job["isolation"]
    try:
        if isolation:
            seal(isolation)
        child = os.fork()
        if child:
            if isolation:
                drop_capabilities()
            guard(child, report)
        if isolation:
            confine(isolation)
        for name, value in job["limits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        if isolation:
            install(bytes.fromhex(isolation["filter"]))
    except (OSError, MemoryError) as error:
        write(report, {"failed": str(error) or type(error).__name__})
        os._exit(1)
    os.close(report)


def run(program: str, call: tuple[str, list[Any]] | None) -> None:
    if call is None:
        execute(program, "__main__")
        return
    # The program could find this descriptor and write to it. It gains nothing: the caller takes exactly one JSON value
    # and compares it outside, and no expected value is in here to be found.
    answer = os.dup(1)
    os.dup2(2, 1)
    function_name, arguments = call
    # Not `__main__`, so that a solution's own `if __name__ == "__main__"` stays asleep.
    namespace = execute(program, "solution")
    function = namespace.get(function_name) or getattr(namespace["Solution"](), function_name)
    result = function(*arguments)
    with open(answer, "w", encoding="utf-8") as stream:
        json.dump(result, stream)


def execute(program: str, name: str) -> dict[str, Any]:
    """Execute the text as module `name`, where dataclasses and pickle look for it; return its namespace."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(program, "program.py", "exec"), module.__dict__)
    return module.__dict__


if __name__ == "__main__":
    job_file, report_file = map(int, sys.argv[1:])
    with open(job_file, encoding="utf-8") as stream:
        whole_job = json.load(stream)
    sys.argv[:] = ["program.py"]
    begin(whole_job, report_file)
    run(whole_job["program"], whole_job["call"])
