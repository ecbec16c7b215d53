"""A sampler that a resumed run reads on from where the first one stopped."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler
from transformers import Trainer
from trl.trainer.utils import RepeatSampler


class ResumableSampler(Sampler):
    """TRL's sampler, with the permutation of the current epoch also in a process that starts at a later one."""

    def __init__(self, sampler: RepeatSampler, trainer: Trainer):
        self.sampler = sampler
        self.trainer = trainer

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed)
            for _ in range(int(self.trainer.state.epoch or 0)):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)
