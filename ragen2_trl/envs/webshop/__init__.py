"""WebShop: a shop to search and click through until an item is bought."""

from ragen2_trl.envs.webshop.environment import WebShop
from ragen2_trl.envs.webshop.ragen2 import RagenWebShop

__all__ = ["RagenWebShop", "WebShop"]
