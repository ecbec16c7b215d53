"""A run of the asynchronous trainer that writes down each group that is done: async_killed.py POLICY FOLDER JOURNAL
[kill]. Some prompts are answered late, so that groups are done out of order."""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import async_cpu
from async_cpu import Server, make_async, prompts_with_dead

from ragen2_trl.trainers.async_groups import GroupLedger


class SlowServer(Server):
    def complete(self, prompt, most):
        late = sum(prompt) % 5 == 3
        time.sleep(0.25 if late else 0.005)
        return super().complete(prompt, most)


def main(policy, folder, journal, kills=False):
    async_cpu.patch()
    async_cpu.async_grpo_trainer.AsyncRolloutWorker = async_cpu.ThreadWorker
    with open(journal, "w") as file:

        def say(**line):
            file.write(json.dumps(line) + "\n")
            file.flush()

        trainer = make_async(
            policy, folder, SlowServer(), dataset=prompts_with_dead(400), snr_strategy="nonzero", max_steps=20,
            save_strategy="steps", save_steps=4, max_inflight_tasks=32,
        )  # fmt: skip
        done, start = GroupLedger.rows_done, trainer.rollout_worker.start

        def told(ledger, group, rows):
            is_done = done(ledger, group, rows)
            if is_done:  # rows that were trained are counted at the end of a step
                say(group=group, step=trainer.state.global_step + (rows == 0))
            return is_done

        def started():
            say(start=trainer._groups_before_resume, range=trainer._strategy.reward_range)
            start()

        GroupLedger.rows_done, trainer.rollout_worker.start = told, started
        step = trainer.training_step

        def train(*args, **kwargs):
            if kills and trainer.state.global_step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*args, **kwargs)

        trainer.training_step = train
        trainer.train(resume_from_checkpoint=None if kills else True)
        say(frontier=len(trainer._groups.ledger))


if __name__ == "__main__":
    policy, folder, journal, *more = sys.argv[1:]
    main(policy, folder, journal, bool(more))
