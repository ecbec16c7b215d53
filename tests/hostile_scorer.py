"""The program `scorer.py` with a stand-in for reasoning-gym: an answer says what scoring it does to the program."""

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

SCORER = Path(__file__).parents[1] / "ragen2_trl" / "envs" / "reasoning_gym" / "scorer.py"
SLOW, IMPOSSIBLE = 555, 666  # numbers of tasks
REPLIES = "".join(f"{asked} made\n{asked} 1.0\n" for asked in range(100))


class Items:
    def __getitem__(self, number):
        if number == SLOW:
            time.sleep(1.0)
        elif number == IMPOSSIBLE:
            os._exit(0)
        return {"answer": "right"}

    def score_answer(self, answer, item):
        if answer == "compute without end":
            while True:
                pass
        elif answer == "wait without end":
            time.sleep(1e6)
        elif answer == "exit":
            sys.exit()
        elif answer == "end":
            os._exit(0)
        elif answer == "raise":
            raise KeyError(answer)
        elif answer == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif answer == "print":
            sys.stdout.write(REPLIES)
            sys.stdout.flush()
            os.write(1, REPLIES.encode())
        return float(answer == item["answer"])


if __name__ == "__main__":  # pytest imports every file, for its examples
    factory = ModuleType("reasoning_gym.factory")
    factory.create_dataset = lambda task, **settings: Items()
    sys.modules.update({"reasoning_gym": ModuleType("reasoning_gym"), "reasoning_gym.factory": factory})
    runpy.run_path(str(SCORER), run_name="__main__")
