"""Pictures of the tasks that have them."""

import json
import random

import pytest
from every_task import NONSENSE, PICTURED, environment, every_picture, every_task, first_texts, rewards_of, rows_of
from PIL import Image, ImageChops
from trl.data_utils import prepare_multimodal_messages

from ragen2_trl.envs import Episode

# Demonstrations


@every_task
def test_every_task_says_whether_it_has_pictures(name):
    env = environment(name)
    episode = env.episode(rows_of(env, 1)[0], random.Random(0))
    assert (name in PICTURED) == (type(episode).image is not Episode.image)
    assert not env.shows_images and "image" not in rows_of(env, 1)[0]


# Pictures


@every_picture
def test_pictures_come_back_from_a_dataset_as_they_were_drawn(name):
    env = environment(name, observation="image")
    for row in env.dataset(5):
        image = row["image"]
        assert isinstance(image, Image.Image) and image.mode == "RGB"
        assert min(image.size) >= 64 and max(image.size) <= 1024
        drawn = env.episode(row, random.Random(0)).image()
        assert drawn.mode == "RGB" and ImageChops.difference(image, drawn).getbbox() is None


@every_picture
def test_pictures_show_the_state_and_words_do_not(name):
    env = environment(name, observation="image")
    assert env.shows_images
    rows = list(env.dataset(20))
    assert len({row["image"].tobytes() for row in rows}) > 15
    assert len({json.dumps(row["prompt"]) for row in rows}) == 1


@every_picture
def test_pictures_go_into_the_first_user_message(name):
    row = environment(name, observation="image").dataset(1)[0]
    _, user = prepare_multimodal_messages(row["prompt"], images=[row["image"]])
    assert [part["type"] for part in user["content"]] == ["image", "text"]
    assert user["content"][0]["image"] is row["image"]


@every_picture
def test_pictures_are_refused_where_later_turns_are_text(name):
    with pytest.raises(ValueError, match=r"observation .*got 'image'"):
        environment(name, multi_turn=True, observation="image")


@every_picture
@pytest.mark.parametrize("multi_turn", [False, True])
def test_pictures_begin_and_answer_the_calls_of_tools(name, multi_turn):
    env = environment(name, multi_turn, protocol="tools", observation="image")
    player, row = env.environment_factory(), env.dataset(1)[0]
    assert "image" not in row  # TRL would look for a place for it
    (picture,) = player.reset(**row)
    drawn = env.episode(row, random.Random(0)).image()
    assert picture["image"].tobytes() == drawn.tobytes()
    answers = [player.move([NONSENSE]) for _ in range(env.max_turns - 1)]
    for shown, words in answers:
        assert shown["image"].tobytes() == drawn.tobytes()
        assert words == {"type": "text", "text": "Invalid answer. Reward -0.1."}


@every_picture
def test_pictures_follow_the_player(name):
    env = environment(name)  # a picture can be had of what is shown in words, too
    episode = env.episode(rows_of(env, 1)[0], random.Random(0))
    rng, drawn = random.Random(0), set()
    for _ in range(30):
        drawn.add(episode.image().tobytes())
        if not episode.done:
            episode.step(episode.random_action(rng))
    assert len(drawn) > 1


@every_picture
def test_rewards_are_those_of_the_same_actions_in_words(name):
    env, words = environment(name, observation="image"), environment(name)
    rows = list(env.dataset(10))
    texts = first_texts(words, rows)
    assert rewards_of(env, rows, completions=texts) == rewards_of(words, rows, completions=texts)
