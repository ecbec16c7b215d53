"""Trainings with the callback, and the rows that they leave."""

import logging

from trl import RLOOConfig

from ragen2_trl import MutualInformationCallback

ROW = "mi/first_turn/retrieval_accuracy"


def length_reward(completion_ids, **kwargs):
    return [float(len(ids) % 3) for ids in completion_ids]


def run(trainer_class, policy_path, args, dataset, reward=length_reward, callback=True, resume=None, **kwargs):
    """A trained trainer and its callback; `callback` may be the callback's settings."""
    rollout_func = kwargs.pop("rollout_func", None)
    extra = {} if rollout_func is None else {"rollout_func": rollout_func}
    trainer = trainer_class(policy_path, reward, args=args, train_dataset=dataset, **extra, **kwargs)
    measuring = None
    if callback is not False:
        measuring = MutualInformationCallback(trainer, **{"min_prompts": 2, **({} if callback is True else callback)})
        trainer.add_callback(measuring)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, measuring


def rows_of(trainer, key=ROW):
    return [row for row in trainer.state.log_history if key in row]


def rloo_args(make_args, **overrides):
    names = RLOOConfig.__dataclass_fields__
    settings = {name: value for name, value in vars(make_args(snr=False, **overrides)).items() if name in names}
    settings.pop("generation_batch_size")
    return RLOOConfig(**settings)


def warnings_of(caplog):
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text for text in texts if "Training has ended" not in text]
