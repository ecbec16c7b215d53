"""SearchQA: questions that a search engine helps to answer."""

from ragen2_trl.envs.search_qa.environment import SearchQA

__all__ = ["SearchQA"]
