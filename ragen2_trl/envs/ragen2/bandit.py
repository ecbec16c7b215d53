"""Bandit as RAGEN-2 plays it: its pairs of names, and what is shown of them."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from ragen2_trl.envs.bandit import Bandit, BanditEpisode
from ragen2_trl.envs.checks import check_choice
from ragen2_trl.envs.episode import Limits
from ragen2_trl.envs.ragen2.protocol import RagenProtocol
from ragen2_trl.envs.tasks import Row

PAIRS = {
    "train": (
        ("Trader", "Teacher"),
        ("StartupFounder", "Nurse"),
        ("Investor", "Librarian"),
        ("StockBroker", "Accountant"),
        ("RealEstateAgent", "Engineer"),
        ("Musician", "Pharmacist"),
        ("Freelancer", "Clerk"),
        ("Youtuber", "Technician"),
        ("Artist", "Planner"),
        ("Pilot", "Postman"),
        ("VentureCapitalist", "Banker"),
        ("Cryptominer", "Gardener"),
    ),
    "test": (
        ("Explorer", "Receptionist"),
        ("Filmmaker", "Archivist"),
        ("Consultant", "Bookkeeper"),
        ("Photographer", "SocialWorker"),
        ("GameDesigner", "Mechanic"),
        ("Entrepreneur", "Secretary"),
        ("DataScientist", "Cashier"),
        ("StartupAccelerator", "CivilServant"),
    ),
}


class RagenBanditEpisode(BanditEpisode):
    """What is shown says nothing of payments. Words are ours, spaces at line ends those of RAGEN's code."""

    shown = (
        "You are playing a bandit game. Choose an arm so that your total reward is as large as can be. \n"
        "There are two arms: {0} and {1}. \n"
        "Each of them pays by a distribution of its own, which has to do with its name. \n"
        "Think about what the two names stand for, and guess from that how each arm may pay.\n"
        "Then choose {0} or {1}, and give its name as your answer."
    )


class RagenBandit(RagenProtocol, Bandit):
    """Bandit as RAGEN-2 plays it: the names are occupations."""

    limits = Limits(turns=1, actions=1)
    max_total, turn_tokens = 1, 500
    pairs = PAIRS

    def texts(self) -> dict[str, str]:
        return {"instruction": ""}  # all is in what is shown

    def numbered_tasks(self, seeds: Iterator[int], split: str, data: str | None) -> Iterator[dict[str, Any]]:
        """A pair and an order for each seed; RAGEN's code adds a number to it that differs within a group."""
        check_choice("data", data, (None,))
        for seed in seeds:
            rng = np.random.Generator(np.random.PCG64(seed))
            bold, safe = self.pairs[split][int(rng.integers(len(self.pairs[split])))]
            yield {"seed": seed, "names": [safe, bold] if rng.random() < 0.5 else [bold, safe], "bold": bold}

    def episode(self, row: Row, rng: random.Random) -> RagenBanditEpisode:
        return RagenBanditEpisode(row["names"], row["bold"], rng)
