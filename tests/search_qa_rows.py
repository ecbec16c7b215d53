"""A question with its passages, and how tests answer it."""

import random

from ragen2_trl.envs.responses import format_response
from ragen2_trl.envs.search_qa.environment import SearchQA

ROW = {
    "seed": 7,
    "question": "In which country is the town where Mira was born?",
    "answer": "Kingdom of Ruk",
    "evidence": [
        {"title": "Mira", "text": "Mira was born in Belmin."},
        {"title": "Belmin", "text": "Belmin is a town in the Kingdom of Ruk."},
    ],
    "passages": [
        {"title": "Mira", "text": "Mira was born in Belmin."},
        {"title": "Osk", "text": "Osk is a river."},
        {"title": "Belmin", "text": "Belmin is a town in the Kingdom of Ruk."},
    ],
}


def answer(action):
    return format_response("A plan.", [action])


def play(env, *actions, row=ROW):
    play = env.play(row, random.Random(0))
    messages = [play.respond(answer(action)) for action in actions]
    return play, messages


def multi(**options):
    return SearchQA(multi_turn=True, **options)
