"""The numbers of a model's size that a rules file names: `heads = "num_attention_heads"`.

They come from the model's `config.json`, or from the file itself, and are worked out when a rule first needs them.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._arguments import integer, path_of
from .._atomic import read_file
from .._expressions import Expression, parse_expression
from .._fork import cached_property
from .._json import strict_json
from .._text import shown
from ..errors import LayoutError, ParseError, ShardwiseError
from ..packed import PackedDim
from ..packed.notation import parse_with
from .wrapped import language_config

__all__ = [
    "CONFIG_FILES",
    "Config",
    "NamedNumbers",
    "StoredConfig",
    "config_text",
    "numbered",
    "read_config",
    "reading_for",
]

#: A model's configuration: its path, that of a folder with a config.json, or what it holds.
Config = str | os.PathLike[str] | Mapping[str, Any]

#: The configuration in a model's folder: where most have it, and where verl does.
CONFIG_FILES = ("config.json", "huggingface/config.json")

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LARGEST = 2**63 - 1
#: The most bytes of a configuration; those of models have some kilobytes.
_LARGEST_FILE = 1 << 24
#: The most keys or numbers that a message names, and the longest name of a number.
_NAMED, _LONGEST_NAME = 8, 200


class NamedNumbers(Mapping[str, "int | tuple[int, ...]"]):
    """The numbers of a rules file, by name.

    Args:
        table: What `[numbers]` holds. A value is a whole number; a list of them; an expression of the file's numbers
            and of the keys of the configuration, nested ones with dots; or a list of these, of which the first counts
            that has all its names. A key whose value is null is not there.
        config: The model's configuration.
        source: The rules file's name in messages.

    Raises:
        ParseError: if a value is none of these, or names itself.

    A look-up raises a `LayoutError` if a number is missing, and a `ParseError` if the configuration cannot be read.

    >>> config = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": None}
    >>> numbers = NamedNumbers({"d": ["head_dim", "hidden_size // num_attention_heads"], "stage": [0, 0, 1]}, config)
    >>> dict(numbers)
    {'d': 128, 'stage': (0, 0, 1)}
    """

    def __init__(
        self, table: Mapping[str, Any] | None = None, config: Config | None = None, source: str = "the rules file"
    ) -> None:
        self._source = source
        self._config = config
        self._keys: Mapping[str, Any] | None = None
        self._found: dict[str, int | tuple[int, ...]] = {}
        #: The keys of the configuration that would do, for each number that is missing.
        self._lacking: dict[str, list[str]] = {}
        self._choices = {name: self._checked(name, value) for name, value in (table or {}).items()}

    def __getitem__(self, name: str) -> int | tuple[int, ...]:
        if name not in self._choices:
            raise KeyError(name)
        if name not in self._found and name not in self._lacking:
            self._work_out(name)
        if name in self._lacking:
            raise LayoutError(f"the number {name} is missing: {self._why(self._lacking[name])}")
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._choices

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    def number(self, what: str, value: object) -> Any:
        """Return the value of an expression; anything but a string is returned as it is; callers check it.

        >>> NamedNumbers({"words": 32000}).number("size", "words + 1")
        32001
        """
        if not isinstance(value, str):
            return value
        try:
            return parse_expression(value).value(self)
        except ShardwiseError as error:
            raise type(error)(f"{what}: {error}") from None

    @property
    def origin(self) -> str:
        """The source of the configuration, for messages."""
        if self._config is None:
            return "the rules file"
        if isinstance(self._config, StoredConfig):
            return repr(str(self._config.place))
        return "the configuration" if isinstance(self._config, Mapping) else repr(str(_config_file(self._config)))

    def for_messages(self, names: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """Return those numbers that have these names, with their values, for messages."""
        values = ((name, self[name]) for name in names if name in self._choices)
        return tuple((name, value) for name, value in values if isinstance(value, int))

    def _checked(self, name: str, value: Any) -> list[int | Expression] | tuple[int, ...]:
        if not isinstance(name, str) or len(name) > _LONGEST_NAME or not _BARE.fullmatch(name):
            raise ParseError(
                f"{self._source}: the name of a number is 1 to {_LONGEST_NAME} letters, digits and _, got {shown(name)}"
            )
        place = f"{self._source}: numbers.{name}"
        choices = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, (list, tuple)) and all(type(one) is int for one in choices):
            return tuple(_fitting(place, one) for one in choices)
        read: list[int | Expression] = []
        for one in choices:
            if type(one) is int:
                read.append(_fitting(place, one))
                continue
            if not isinstance(one, str):
                raise ParseError(f"{place} must be a whole number, an expression, or a list of these, got {shown(one)}")
            try:
                read.append(parse_expression(one))
            except ParseError as error:
                raise ParseError(f"{place}: {error}") from None
        return read

    def _work_out(self, name: str) -> None:
        """Find a number, or that it is missing: those that it needs first, however long the chain, and each once."""
        begun = {name: self._worked_out(name)}
        while begun:
            last = next(reversed(begun))
            needed = next(begun[last], None)
            if needed is None:
                del begun[last]
            elif needed in begun:
                circle = [*list(begun)[list(begun).index(needed) :], needed]
                said = circle if len(circle) <= _NAMED else [*circle[: _NAMED - 2], "…", *circle[-2:]]
                raise ParseError(f"{self._source}: numbers.{needed} needs itself: {' -> '.join(said)}")
            else:
                begun[needed] = self._worked_out(needed)

    def _worked_out(self, name: str) -> Iterator[str]:
        """Work out a number whose own numbers are known."""
        choices = self._choices[name]
        if isinstance(choices, tuple):
            self._found[name] = choices
            return
        lacking: dict[str, None] = {}
        for choice in choices:
            if isinstance(choice, int):
                self._found[name] = choice
                return
            known: dict[str, int | tuple[int, ...]] = {}
            missing: list[str] = []
            for key in choice.names:
                if key in self._choices and key != name:
                    if key not in self._found and key not in self._lacking:
                        yield key
                    missing = self._lacking.get(key, [])
                    if not missing:
                        known[key] = self._found[key]
                elif (found := self._stated(key)) is None:
                    missing = [key]
                else:
                    known[key] = found
                if missing:
                    break
            if missing:
                lacking.update(dict.fromkeys(missing))
                continue
            alone = known.get(choice.text.strip())  # Which may be a list.
            try:
                self._found[name] = choice.value(known) if alone is None else alone
            except LayoutError as error:
                raise type(error)(f"the number {name}: {error}") from None
            return
        # More than a message names would only grow from number to number.
        self._lacking[name] = list(lacking)[: _NAMED + 1]

    def _why(self, lacking: Sequence[str]) -> str:
        names = " or ".join(lacking[:_NAMED]) + (" or others" if len(lacking) > _NAMED else "")
        if self._config is None:
            return f"it is {names} of the model's config.json, and none is given (--config FILE, or config=)"
        return f"{self.origin} has no {names}{self._elsewhere(lacking)}"

    def _elsewhere(self, lacking: Sequence[str]) -> str:
        """Return advice on a key that only another part of the configuration has; empty if none has it."""
        found = [
            f"{part}.{key}"
            for part, said in (self._keys or {}).items()
            if isinstance(said, Mapping)
            for key in dict.fromkeys(lacking)
            if said.get(key) is not None
        ]
        return f"; if {found[0]} is meant, write that in [numbers] of a file of your own" if found else ""

    def _stated(self, key: str) -> int | tuple[int, ...] | None:
        """Return the value of a key of the configuration; `None` if it has none."""
        if self._keys is None:
            self._keys = {} if self._config is None else language_config(read_config(self._config))
        found: Any = self._keys
        for step in key.split("."):
            if not isinstance(found, Mapping) or found.get(step) is None:
                return None
            found = found[step]
        place = f"{key} of {self.origin}"
        if isinstance(found, (list, tuple)) and found and all(type(one) is int for one in found):
            return tuple(_fitting(place, one) for one in found)
        if type(found) is not int:
            raise ParseError(f"{place} must be a whole number, got {shown(found)}")
        return _fitting(place, found)


def numbered(text: Any, sizes: Mapping[str, Any], numbers: NamedNumbers) -> PackedDim:
    """Return a packed dim read from text, with its own sizes, which may be expressions, and a file's numbers."""
    own = {name: integer(name, numbers.number(name, size)) for name, size in sizes.items()}
    dim, used = parse_with(text, _Both(own, numbers) if numbers else own)
    if unused := sorted(own.keys() - used.keys()):
        raise LayoutError(f"sizes has {shown(unused[0])}, which {shown(text)} does not name")
    return replace(dim, numbers=numbers.for_messages(name for name in used if name not in own))


class _Both(Mapping[str, "int | Sequence[int]"]):
    """A mapping that looks a name up in the sizes of a dim, then in a file's numbers, which it works out only then."""

    def __init__(self, own: Mapping[str, int], numbers: NamedNumbers) -> None:
        self._own, self._numbers = own, numbers

    def __getitem__(self, name: str) -> int | Sequence[int]:
        return self._own[name] if name in self._own else self._numbers[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._own, *self._numbers)))

    def __len__(self) -> int:
        return len(list(iter(self)))


class StoredConfig(Mapping[str, Any]):
    """A model's configuration in a file or an object, which is read when it is first needed.

    Args:
        place: Its path or URL.
        read: Returns its bytes.

    >>> config = StoredConfig("HF/config.json", lambda: b'{"num_attention_heads": 32}')
    >>> NamedNumbers({"heads": "num_attention_heads"}, config)["heads"]
    32
    """

    def __init__(self, place: object, read: Callable[[], bytes]) -> None:
        self.place = place
        self._read = read

    @cached_property
    def _contents(self) -> Mapping[str, Any]:
        return parsed_config(self._read(), self.place)

    def __getitem__(self, key: str) -> Any:
        return self._contents[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)


@contextmanager
def reading_for(source: str | os.PathLike[str]) -> Iterator[None]:
    """Say that a checkpoint is not there, rather than that its configuration lacks a number."""
    try:
        yield
    except LayoutError:
        path = os.fspath(source)
        if "://" not in path and not Path(path).exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        raise


def _fitting(place: str, value: int) -> int:
    if not -_LARGEST <= value <= _LARGEST:
        raise ParseError(f"{place} is {shown(value)}, over the limit of {_LARGEST}")
    return value


def _config_file(config: str | os.PathLike[str]) -> Any:
    path = path_of(config)
    if not path.is_dir():
        return path
    return next((path / name for name in CONFIG_FILES if (path / name).is_file()), path / CONFIG_FILES[0])


def read_config(config: Config) -> Mapping[str, Any]:
    """Return the contents of a model's configuration.

    Raises:
        OSError: if the file cannot be read.
        ParseError: if the contents are not an object of JSON.
    """
    if isinstance(config, Mapping):
        return config
    return parsed_config(config_text(config), repr(str(_config_file(config))))


def parsed_config(data: bytes, place: object) -> Mapping[str, Any]:
    """Return the contents of a model's configuration from its bytes; `place` is for messages.

    Raises:
        ParseError: if the contents are not an object of JSON.
    """
    # Models with state spaces have a limit that is infinite.
    found = strict_json(data, place, constants=True)
    if not isinstance(found, dict):
        raise ParseError(f"{place} is not a model's configuration: it must be a JSON object")
    return found


def config_text(config: Config) -> bytes:
    r"""Return the contents of a model's `config.json`: those of the file, or what it holds as JSON.

    >>> config_text({"model_type": "llama"})
    b'{\n  "model_type": "llama"\n}\n'
    """
    if isinstance(config, Mapping):
        return f"{json.dumps(dict(config), indent=2)}\n".encode()
    data: bytes = read_file(_config_file(config), _LARGEST_FILE)
    return data
