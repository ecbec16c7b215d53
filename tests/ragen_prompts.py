"""What prompts in RAGEN-2's layout are made of, as facts about it have them."""

HELPER = "You're a helpful assistant. "
FORM = "<think> [Your thoughts] </think> <answer> [your answer] </answer>"


class Rows:
    """A table of `size` rows, made when they are asked for, with the number of each in it."""

    def __init__(self, size, row):
        self.size, self.row = size, row
        self.column_names = list(row(0))

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        assert 0 <= index < self.size
        return self.row(index)

    def select(self, indices):
        return Rows(len(indices), self.row)


def say(answer, reasoning="Hm."):
    """A response as a model writes it behind the forced tag."""
    return f"{reasoning}</think> <answer>{answer}</answer>"


def prompt_of(env, row):
    """The system message's instruction and the state, of a prompt whose layout is RAGEN-2's."""
    system, user = (message["content"] for message in env.prompt(row))
    assert system.startswith(HELPER)
    start = "\nTurn 1:\nState:\n"
    assert user.startswith(start)
    state, line_break, last = user.removeprefix(start).rpartition("\n")
    assert line_break and FORM in last
    return system.removeprefix(HELPER), state, last


def limits(env):
    return env.max_turns, env.max_actions, env.max_total_actions, env.max_turn_tokens
