"""Kinds of values as people write them: how each is checked, and printed for copying."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from advisor.cache.config import Config, Value
from advisor.errors import UsageError

MAX_NUMBER = 2**31 - 1
"""The largest number taken anywhere: far above any that is meant, and safe to compute with."""
MAX_SHAPES = 8
MAX_LISTED = 64

T = TypeVar("T")
_Number = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]


class Kind(Generic[T]):
    """How one kind of value is checked and written.

    Attributes:
        type: what msgspec converts a value to; numbers may be texts.
        metavar: what stands for a value in help.
        expected: the domain, in words.
        repeats: the option may be given again.
    """

    type: Any = str
    metavar = "TEXT"
    expected = "text on one line"
    repeats = False

    def parse(self, value: Any) -> T:
        """The value in its own form, from that form or from text. Raises if it is neither."""
        found: T = msgspec.convert(value, self.type, strict=False)
        return found

    def checked(self, what: str, value: object) -> T:
        """As `parse`. UsageError names `what`, the value and what is expected."""
        try:
            return self.parse(value)
        except (TypeError, ValueError, LookupError, OverflowError, AttributeError):
            raise UsageError(f"{what} {value!r}: expected {self.expected}") from None

    def asked(self, what: str, value: object) -> T:
        """As `checked`, of what a person gives, which may be less than what a run can have."""
        return self.checked(what, value)

    def texts(self, value: Any) -> list[str]:
        """As the option takes it: one text, or one for each time that it is given."""
        if not isinstance(value, tuple):
            return [str(value)]
        parts = [str(part) for part in value]
        return parts if self.repeats else [",".join(parts)]

    def literal(self, value: Any) -> str:
        """As Python takes it."""
        return f"[{', '.join(map(_quoted, value))}]" if isinstance(value, tuple) else _quoted(value)


def _quoted(value: object) -> str:
    """repr() with double quotes if that is as short."""
    text = repr(value)
    if text.startswith("'") and '"' not in text and "\\" not in text:
        return f'"{text[1:-1]}"'
    return text


def _require(holds: object) -> None:
    if not holds:
        raise ValueError


def _listed(value: Any) -> Any:
    """The members of a text with commas; another value unchanged."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class Line(Kind[str]):
    """One line of printable characters, or none."""

    def parse(self, value: Any) -> str:
        _require(isinstance(value, str) and value.isprintable())
        return str(value)


class Text(Line):
    """One line of printable characters."""

    def parse(self, value: Any) -> str:
        _require(value)
        return super().parse(value)


class Words(Kind["tuple[str, ...]"]):
    """The words of a command."""

    type = tuple[str, ...]
    expected = "the words of a command"
    repeats = True

    def parse(self, value: Any) -> tuple[str, ...]:
        return tuple(map(Line().parse, super().parse(value)))


class Choice(Kind[str]):
    """One of some names."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.metavar = "|".join(names)
        self.expected = f"one of {', '.join(names)}"

    def parse(self, value: Any) -> str:
        name = str(value).removeprefix("torch.")
        _require(name in self.names)
        return name


class Known(Choice):
    """One of some names that a person may give; a run may have others."""

    def parse(self, value: Any) -> str:
        return value if re.fullmatch(r"[a-z][a-z0-9_]{0,31}", value) else super().parse(value)

    def asked(self, what: str, value: object) -> str:
        return Choice(self.names).checked(what, value)


class MultiChoice(Kind["tuple[str, ...]"]):
    """Some of some names, in their own order; as text with commas between."""

    metavar = "LIST"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.expected = f"some of {', '.join(names)}"

    def parse(self, value: Any) -> tuple[str, ...]:
        taken = {Choice(self.names).parse(name) for name in _listed(value)}
        _require(taken)
        return tuple(name for name in self.names if name in taken)


class Switch(Kind[bool]):
    """On or off."""

    metavar = ""
    expected = "True or False"

    def parse(self, value: Any) -> bool:
        return msgspec.convert(value, bool)


class Whole(Kind[int]):
    """A whole number."""

    metavar = "N"

    def __init__(self, least: int = 1) -> None:
        self.type = Annotated[int, Meta(ge=least, le=MAX_NUMBER)]
        self.expected = f"a number from {least} to {MAX_NUMBER}"


class Fraction(Kind[float]):
    """A number from 0 to below 1."""

    type = Annotated[float, Meta(ge=0, lt=1)]
    metavar = "FRACTION"
    expected = "a fraction such as 0.02"


class Device(Kind[str]):
    """The device to measure on."""

    type = Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,4})?)\Z")]
    metavar = "cuda:N|cpu"
    expected = "cpu, cuda or cuda:N, e.g. cuda:0"

    def parse(self, value: Any) -> str:
        return super().parse(str(value))


class Numbers(Kind["tuple[int, ...]"]):
    """Whole numbers from 1, sorted; as text with commas between."""

    type = Annotated[tuple[_Number, ...], Meta(max_length=MAX_LISTED)]
    metavar = "16,32,64"
    expected = f"up to {MAX_LISTED} numbers of at least 1, as 16,32,64"

    def parse(self, value: Any) -> tuple[int, ...]:
        return tuple(sorted({*super().parse(list(_listed(value)))}))


class Bytes(Kind[int]):
    """'20GiB', '512MB' or a number of bytes."""

    metavar = "SIZE"
    expected = "a positive size such as 40GiB or 512MiB"

    def parse(self, value: Any) -> int:
        units = {"": 1, "b": 1}
        for power, prefix in enumerate("kmgt", start=1):
            units |= {f"{prefix}ib": 1024**power, f"{prefix}b": 1000**power, prefix: 1024**power}
        text = str(value).strip().lower()
        number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
        size = int(float(number) * units[text[len(number) :].strip()])
        _require(0 < size < 2**63)
        return size

    def texts(self, value: int) -> list[str]:
        for power, unit in ((3, "GiB"), (2, "MiB")):
            if value % 1024**power == 0:
                return [f"{value // 1024**power}{unit}"]
        return [str(value)]

    def literal(self, value: int) -> str:
        return f'"{self.texts(value)[0]}"'


class Seconds(Kind[float]):
    """A time above zero: seconds, or '90s', '5m', '1h30m'."""

    metavar = "TIME"
    expected = "a time above zero, as 90s, 5m or 1h30m"

    def parse(self, value: Any) -> float:
        number = r"(\d+(?:\.\d+)?)"
        parts = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s?)?", str(value).strip())
        hours, minutes, seconds = (float(part or 0) for part in (parts.groups() if parts else ()))
        total = 3600 * hours + 60 * minutes + seconds
        _require(0 < total < 1e9)
        return total

    def texts(self, value: Any) -> list[str]:
        return [f"{value:g}s"]

    def literal(self, value: Any) -> str:
        return f'"{value:g}s"'


_Shape = Annotated[tuple[_Number, ...], Meta(min_length=2, max_length=16)]
Shape = Sequence[int] | str
"""(64, 3, 256, 256) or '64x3x256x256': a batch and a sample."""


class Shapes(Kind["tuple[tuple[int, ...], ...]"]):
    """One shape, or two to eight that a job's inputs alternate between, the largest first."""

    type = Annotated[tuple[_Shape, ...], Meta(min_length=1)]
    metavar = "BATCHxSAMPLE"
    expected = f"a batch and a sample, each number from 1 to {MAX_NUMBER}, e.g. 64x3x256x256"
    repeats = True

    def parse(self, value: Any) -> tuple[tuple[int, ...], ...]:
        parts = [value] if isinstance(value, str) else list(value)
        if all(isinstance(one, int) or str(one).isdigit() for one in parts):
            parts = [parts]
        split = [one.lower().split("x") if isinstance(one, str) else one for one in parts]
        found = super().parse(split)
        if not len(found) == len(set(found)) <= MAX_SHAPES or len({*map(len, found)}) > 1:
            raise UsageError(
                f"shapes {value!r}: expected up to {MAX_SHAPES} different shapes with the same "
                "number of dimensions"
            )
        return tuple(sorted(found, key=lambda one: (-math.prod(one), one)))

    def texts(self, value: Any) -> list[str]:
        return ["x".join(map(str, shape)) for shape in value]

    def literal(self, value: Any) -> str:
        return str(value[0]) if len(value) == 1 else str(list(value))


class Arguments(Kind[Config]):
    """Keyword arguments by name, as a mapping or as texts 'NAME=VALUE'."""

    metavar = "NAME=VALUE"
    expected = "NAME=VALUE, each name once, e.g. num_classes=10"
    repeats = True

    def parse(self, value: Any) -> Config:
        pairs = value.items() if isinstance(value, Mapping) else list(self._pairs(value))
        _require(len({name for name, _ in pairs}) == len(pairs))
        _require(all(self.holds(name, held) for name, held in pairs))
        return Config(dict(pairs))

    def _pairs(self, value: Any) -> Iterator[tuple[str, Value]]:
        for text in [value] if isinstance(value, str) else value:
            name, rest = text.split("=", 1)
            yield name, self.read(rest)

    def holds(self, name: Any, _held: object) -> bool:
        """Whether a value is valid for this name."""
        return isinstance(name, str) and name.isidentifier()

    def read(self, text: str) -> Value:
        """The value behind '='."""
        return _value(text)

    def texts(self, value: Config) -> list[str]:
        return [f"{name}={_written(held)}" for name, held in value.items()]

    def literal(self, value: Config) -> str:
        return f"{{{', '.join(f'{_quoted(name)}: {_quoted(v)}' for name, v in value.items())}}}"


class Options(Arguments):
    """Options of a script, by what they set."""

    metavar = "KNOB=OPTION"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.expected = f"KNOB=OPTION, e.g. batch=--batch-size; KNOB is one of {', '.join(names)}"

    def holds(self, name: Any, held: object) -> bool:
        return name in self.names and bool(re.fullmatch(r"--?[A-Za-z][\w.-]{0,99}", str(held)))

    def read(self, text: str) -> Value:
        return text


def _written(value: Value) -> str:
    """As `_value` reads it back."""
    if isinstance(value, str):
        return f'"{value}"' if _value(value) != value else value
    return "none" if value is None else str(value)


def _value(text: str) -> Value:
    """Numbers, true, false and none as such, anything else, and what is in "quotes", as text."""
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return text[1:-1]
    known: dict[str, Value] = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text
