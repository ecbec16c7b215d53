"""WebShop: a shop to search and click through until an item is bought."""

from ragen2_trl.envs.webshop.environment import WebShop

__all__ = ["WebShop"]
