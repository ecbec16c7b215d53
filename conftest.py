"""What `--doctest-modules` cannot import without the extra it belongs to."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("openenv") else ["ragen2_trl/openenv"]
