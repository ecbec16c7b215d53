"""Policies that are tables: what a model of few words says, with exact probabilities.

A prompt is one word, and a completion `<think>` thought `</think><answer>` answer `</answer>`, each of one word.
"""

import random
from types import SimpleNamespace

import torch
from torch import nn

from ragen2_trl.instrument.reasoning import Trajectories

SIZE = 8  # prompts, thoughts, answers
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<end>")
WORDS = [f"{kind}{number} " for kind in "xza" for number in range(SIZE)] + list(TAGS)
THINK, END_THINK, ANSWER, END_ANSWER, END = range(3 * SIZE, 3 * SIZE + len(TAGS))
IMPOSSIBLE = -60.0  # nats


class Words:
    """A tokenizer."""

    all_special_ids = (END,)

    def convert_ids_to_tokens(self, ids):
        return [WORDS[number] for number in ids]

    def decode(self, ids, **kwargs):
        return "".join(self.convert_ids_to_tokens(ids))


class Tabular(nn.Module):
    """p(z | x) of (x, z) and p(a | x, z) of (x, z, a)."""

    def __init__(self, thoughts, answers):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(vocab_size=len(WORDS), get_text_config=lambda: self.config)
        self.thoughts, self.answers = torch.as_tensor(thoughts).double(), torch.as_tensor(answers).double()

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, **kwargs):
        logits = torch.full((*input_ids.shape, len(WORDS)), IMPOSSIBLE)
        for row, ids in enumerate(input_ids.tolist()):
            prompt = thought = 0
            for place, number in enumerate(ids):
                if number < SIZE:
                    prompt = number
                elif number < 2 * SIZE:
                    thought = number - SIZE
                logits[row, place] = self.next_word(number, prompt, thought)
        return SimpleNamespace(logits=logits)

    def next_word(self, number, prompt, thought):
        logits = torch.full((len(WORDS),), IMPOSSIBLE)
        if number == THINK:
            logits[SIZE : 2 * SIZE] = self.thoughts[prompt].log().clamp(min=IMPOSSIBLE)
        elif number == ANSWER:
            logits[2 * SIZE : 3 * SIZE] = self.answers[prompt, thought].log().clamp(min=IMPOSSIBLE)
        else:
            following = {END_THINK: ANSWER, END_ANSWER: END}
            logits[
                following.get(number, THINK if number < SIZE else END_THINK if number < 2 * SIZE else END_ANSWER)
            ] = 0
        return logits

    def sampled(self, samples, seed=0):
        """Trajectories of `samples` completions of each prompt, and their groups."""
        rng, prompts, completions = random.Random(seed), [], []
        for prompt in range(SIZE):
            for _ in range(samples):
                thought = rng.choices(range(SIZE), self.thoughts[prompt].tolist())[0]
                answer = rng.choices(range(SIZE), self.answers[prompt, thought].tolist())[0]
                prompts.append([prompt])
                completions.append([THINK, SIZE + thought, END_THINK, ANSWER, 2 * SIZE + answer, END_ANSWER, END])
        return Trajectories(prompts, completions, Words()), [number // samples for number in range(len(prompts))]


OWN, ANY = torch.eye(SIZE), torch.full((SIZE, SIZE), 1 / SIZE)
FEW = torch.tensor([0.5, 0.5] + [0.0] * (SIZE - 2)).expand(SIZE, SIZE)  # two words, whatever the prompt
FROM_PROMPT = OWN[:, None, :].expand(SIZE, SIZE, SIZE)  # a = x
FROM_THOUGHT = OWN[None, :, :].expand(SIZE, SIZE, SIZE)  # a = z
FROM_NOTHING = FEW[None].expand(SIZE, SIZE, SIZE)

# By name: p(z | x), p(a | x, z).
POLICIES = {
    "faithful": (OWN, FROM_THOUGHT),
    "harmless template": (FEW, FROM_PROMPT),
    "decorative": (OWN, FROM_PROMPT),
    "collapsed": (FEW, FROM_NOTHING),
    "shuffled": (ANY, FROM_PROMPT),
    "blind": (ANY, FROM_THOUGHT),
}
