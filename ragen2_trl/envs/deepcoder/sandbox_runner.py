"""Runs inside the sandbox: takes the limits upon itself, then becomes the program.

`sandbox.py` passes this file's text to `python -c`, so that no file of the package is visible inside. Its argument is
the descriptor of a JSON job: `program` (text), `limits` (resource name → value) and `call` (None, or a function's name
and its arguments).

A job without a call is the program as a script. A job with a call prints what the function returns as JSON on stdout;
what the program itself prints goes to stderr.
"""

import json
import os
import resource
import sys
from types import ModuleType
from typing import Any


def run(job: dict[str, Any]) -> None:
    for name, value in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if job["call"] is None:
        execute(job["program"], "__main__")
        return
    # The program could find this descriptor and write to it. It gains nothing: the caller takes exactly one JSON value
    # and compares it outside, and no expected value is in here to be found.
    answer = os.dup(1)
    os.dup2(2, 1)
    function_name, arguments = job["call"]
    # Not `__main__`, so that a solution's own `if __name__ == "__main__"` stays asleep.
    namespace = execute(job["program"], "solution")
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
    with open(int(sys.argv.pop()), encoding="utf-8") as job_file:
        job = json.load(job_file)
    sys.argv[0] = "program.py"
    run(job)
