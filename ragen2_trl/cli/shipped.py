"""The YAML files that ship with the package: recipes by their names, and configurations of `accelerate launch`."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def _by_name(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.yaml"))}


RECIPES = _by_name(_PACKAGE / "recipes")
ACCELERATE_CONFIGS = _by_name(_PACKAGE / "accelerate_configs")


def recipe_path(name: str) -> Path:
    """The file of a recipe.

    Raises:
        ValueError: If there is no recipe of that name.

    >>> recipe_path("ragen2/paper").name
    'paper.yaml'
    """
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}")
    return RECIPES[name]
