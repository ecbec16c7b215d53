"""Which of the sandbox's defences hold on this machine, each as seen from a program inside or from the kernel."""

import json
from dataclasses import dataclass

from ragen2_trl.envs.deepcoder.sandbox import Sandbox
from ragen2_trl.envs.deepcoder.sandbox_machine import runtime_folder
from ragen2_trl.envs.deepcoder.sandbox_syscalls import allowed_calls

_LOOK_AROUND = """
import json, os, resource
def refused(function, *arguments):
    try:
        function(*arguments)
        return False
    except OSError:
        return True
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
tmp = os.statvfs("/tmp")
# The filter lets through no call about this limit, not even one that asks.
(seconds,) = (line.split()[-2] for line in open("/proc/self/limits") if line.startswith("Max cpu time"))
print(json.dumps({
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16),
    "filtered": status["NoNewPrivs"].strip() == "1" and refused(os.memfd_create, "memory") and refused(os.setsid),
    "networks": [line.split(":")[0].strip() for line in open("/proc/self/net/dev")][2:],
    "settings": all(refused(open, path, "w") for path in ("/proc/sys/kernel/shmmax", "/attack", "/dev/attack"))
    and all(refused(os.utime, f"/dev/{name}") for name in ("null", "zero", "full", "random", "urandom")),
    "tmp_bytes": tmp.f_frsize * tmp.f_blocks,
    "tmp_files": tmp.f_files,
    "limits": {"RLIMIT_CPU": int(seconds)} | {
        name: resource.getrlimit(getattr(resource, name))[1]
        for name in ("RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_NOFILE", "RLIMIT_FSIZE")
    },
}))
"""
_MIB = 1 << 20


@dataclass(frozen=True)
class Defence:
    """What is kept from a program or bounded, whether it is so here, and how, or why not."""

    name: str
    active: bool
    detail: str


def find_defences() -> list[Defence]:
    """All defences of the sandbox, tried with a program.

    Raises:
        SandboxUnavailableError: If programs cannot be isolated here.
        SandboxFailedError: If the machine can no longer run programs.
    """
    sandbox = Sandbox()
    seen = json.loads(sandbox.run(_LOOK_AROUND).stdout)
    limits, expected = seen["limits"], sandbox.limits.resources
    bounded = all(limits[name] == expected[name] for name in limits)
    files = seen["tmp_files"] == sandbox.limits.files and seen["tmp_bytes"] == sandbox.limits.file_bytes
    times = f"{limits['RLIMIT_CPU']} s of CPU, {limits['RLIMIT_AS'] // _MIB} MiB of address space, "
    places = f"{sandbox.places} for all your processes, by locks in {runtime_folder()}"
    return [
        Defence("system calls", seen["filtered"], f"{len(allowed_calls())} are let through, some by their arguments"),
        Defence("processes", seen["processes"] == [1, 2], "none in sight but the guard, in whose end all end"),
        Defence("rights", seen["capabilities"] == 0, "no capabilities, nobody's user in a namespace of its own"),
        Defence("network", seen["networks"] == ["lo"], "a namespace without a way out; no socket can be opened"),
        Defence("files", seen["settings"], "nothing can be written but /tmp, nor can /proc and its settings"),
        Defence("size of /tmp", files, f"{seen['tmp_bytes'] // _MIB} MiB and {seen['tmp_files']} files, in memory"),
        Defence("limits", bounded, f"{times}{limits['RLIMIT_NPROC']} threads, {limits['RLIMIT_NOFILE']} descriptors"),
        *_cgroup_defences(sandbox),
        Defence("programs at a time", True, places),
    ]


def _cgroup_defences(sandbox: Sandbox) -> list[Defence]:
    assert sandbox.isolation
    parent = sandbox.isolation.parent
    if parent is None:
        why = (
            "no cgroup v2 here that you may make groups in: run as root, or in a delegated slice (systemd-run --user)"
        )
        return [Defence("control group", False, why)]
    uses = {
        "memory": "the kernel's own memory is counted, too",
        "pids": "processes and threads are counted, too",
        "io": "others' reads from disk come first",
    }
    on, missing = parent.controllers, f"the controller is not switched on in {parent.path}"
    return [
        Defence("control group", True, f"a run's processes end by one write (cgroup.kill), below {parent.path}"),
        *(Defence(f"control group: {name}", name in on, use if name in on else missing) for name, use in uses.items()),
    ]
