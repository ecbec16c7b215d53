"""A program that scores answers to tasks of reasoning-gym, run beside training, because answers are hostile text.

It reads lines `{"asked", "task", "config", "number", "answer"}`, numbered by `asked`, and answers each with
`asked made` when it has the task, and then with `asked score`, or the name of the error with which the scorer failed.
Over some answers a scorer takes for ever, or all memory (a move repeated 10^9 times, a number of as many digits): its
limit of processor time, or who asks, ends this program then, and who asks starts another. Nothing here evaluates what
a model wrote; tasks whose scorer does are refused before (see `evaluating_functions`).
"""

import functools
import json
import math
import os
import resource
import sys
import time
from typing import Any

SIZE = 10_000  # tasks of a generator; some make a list of all of them
MEMORY = 4 << 30  # bytes
PROCESSOR_SECONDS = 2  # for an answer; a right one takes hundredths


@functools.lru_cache(maxsize=8)
def generator(task: str, config: str) -> Any:
    """The generator of a task; its item of a number is the same in every process."""
    from reasoning_gym.factory import create_dataset

    return create_dataset(task, **{"seed": 0, "size": SIZE, **json.loads(config)})


def score(items: Any, item: dict[str, Any], answer: str) -> str:
    """What an answer is worth, 0.0 to 1.0; where the scorer fails over it, the name of the error."""
    try:
        return str(min(1.0, max(0.0, float(items.score_answer(answer, item)))))
    except Exception as error:  # noqa: BLE001 - scorers were not written for every text
        return type(error).__name__


def _at_most(wanted: int, kind: int) -> int:
    """A limit, or the lower one that was set from outside, beyond which nobody but root may go."""
    _, hard = resource.getrlimit(kind)
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def main() -> None:
    import reasoning_gym  # noqa: F401 - takes seconds, and is done when the first line is written

    answers = os.fdopen(os.dup(1), "w")
    memory = _at_most(MEMORY, resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    usual = resource.getrlimit(resource.RLIMIT_CPU)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # what a scorer prints is no answer
        os.dup2(nowhere, output)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        items = generator(question["task"], question["config"])
        item = items[question["number"]]
        print(question["asked"], "made", file=answers, flush=True)
        seconds = _at_most(math.ceil(time.process_time()) + PROCESSOR_SECONDS, resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, usual[1]))
        worth = score(items, item, question["answer"])
        resource.setrlimit(resource.RLIMIT_CPU, usual)
        print(question["asked"], worth, file=answers, flush=True)


if __name__ == "__main__":
    main()
