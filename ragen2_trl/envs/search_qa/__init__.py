"""SearchQA: questions that a search engine helps to answer."""

from ragen2_trl.envs.search_qa.environment import SearchQA
from ragen2_trl.envs.search_qa.ragen2 import RagenSearchQA

__all__ = ["RagenSearchQA", "SearchQA"]
