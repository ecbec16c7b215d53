"""A few passages to search, and files of them."""

import json

from ragen2_trl.envs.search_qa.passages import Passage

PASSAGES = (
    Passage("Belmin", "Belmin is a town on the river Osk."),
    Passage("Osk", "The Osk is a river."),
    Passage("Mira Tavok", "Mira Tavok, a potter, was born in Belmin."),
    Passage("Malcolm X", "Malcolm X gave a speech."),
    Passage("Empty", ""),
)


def titles(found):
    return [[passage.title for passage in passages] for passages in found]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
