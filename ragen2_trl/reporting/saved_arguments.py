"""The arguments of a trainer as transformers saves them, in a pickle that may be anybody's and is never unpickled."""

import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARGUMENTS_FILE = "training_args.bin"
MAX_FILE, MAX_PICKLE = 2**20, 2**18  # bytes; a real one has some 8,000
MAX_TEXT, MAX_LIST = 200, 32


@dataclass
class Named:
    """A class that a pickle names, or an object that it would make: its name, what it is called with, its state."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None


def read_arguments(path: Path) -> tuple[str, dict[str, Any]]:
    """The class of a trainer's arguments, by its name, and their values: texts, numbers and lists of numbers.

    Raises:
        ValueError: If the file is no such pickle, or holds anything that arguments do not need.
        OSError: If it cannot be read.
        LookupError: If its pickle takes what it has not made.
    """
    made = _parse(_pickle_of(path))
    if not isinstance(made, Named) or not isinstance(made.state, dict):
        raise ValueError("it holds no arguments of a trainer")
    if made.name == "_reconstructor" and made.args and isinstance(made.args[0], Named):  # how copyreg makes an object
        made.name = made.args[0].name
    values = {name: _plain(value) for name, value in made.state.items()}
    return made.name, {name: value for name, value in values.items() if _is_plain(value)}


def _pickle_of(path: Path) -> bytes:
    if (size := path.stat().st_size) > MAX_FILE:
        raise ValueError(f"it has {size} bytes; allowed: {MAX_FILE}")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
            if not entries:
                raise ValueError("it holds no data.pkl")
            # PyTorch does not compress, so that no more is read than the file has.
            if entries[0].compress_type != zipfile.ZIP_STORED or entries[0].file_size > MAX_PICKLE:
                raise ValueError(
                    f"its data.pkl is compressed or has {entries[0].file_size} bytes; allowed: {MAX_PICKLE}"
                )
            return archive.read(entries[0])
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"it is no file of torch.save: {error}") from error


def _parse(data: bytes) -> Any:
    """What a pickle is of, with a `Named` for each class and object: nothing that it names is looked up or called.

    A restricted unpickler is not enough: a pickle can make it take memory without end, or hash a key forever.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def take(start: int) -> list[Any]:
        taken = stack[start:]
        del stack[start:]
        return taken

    for opcode, value, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO":
                pass
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(value)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(take(marks.pop())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(take(-int(opcode.name[-1]))))
            case "APPEND" | "APPENDS":
                items = take(-1 if opcode.name == "APPEND" else marks.pop())
                if isinstance(stack[-1], list):
                    stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = take(-2 if opcode.name == "SETITEM" else marks.pop())
                if isinstance(stack[-1], dict):
                    pairs = zip(items[::2], items[1::2], strict=True)
                    stack[-1].update((key, item) for key, item in pairs if isinstance(key, str))
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "GLOBAL":
                stack.append(Named(str(value).rpartition(" ")[2]))
            case "REDUCE" | "NEWOBJ":
                kind, args = take(-2)
                if not isinstance(kind, Named) or not isinstance(args, tuple):
                    raise ValueError("it calls something that is no class")
                stack.append(Named(kind.name, args))
            case "BUILD":
                made, state = take(-2)
                if isinstance(made, Named):
                    made.state = state
                stack.append(made)
            case "STOP":
                return stack.pop()
            case name:
                raise ValueError(f"its pickle holds {name}, which arguments do not need")


def _plain(value: Any) -> Any:
    """A member of an enumeration is what its class would be called with."""
    return value.args[0] if isinstance(value, Named) and len(value.args) == 1 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= MAX_LIST and all(isinstance(one, int | float) and _is_plain(one) for one in value)
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return isinstance(value, float | None) or (isinstance(value, int) and abs(value) < 2**63)
