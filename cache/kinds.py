"""Kinds of values that people write: how each kind is checked, and printed for copying."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
from msgspec import Meta

from advisor.cache.config import Config, Value
from advisor.errors import UsageError

MAX_NUMBER = 2**31 - 1  # the largest accepted: far above any real one, safe to compute with
MAX_SHAPES = 8
MAX_NUMBERS = 64

T = TypeVar("T")
_Number = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]


class Kind(Generic[T]):
    """How one kind of value is checked and written.

    `type`: what msgspec converts a value to; `metavar`: its placeholder in help; `expected`: the
    domain, in words; `repeats`: the option may be given again; `has_unit`: printed Python code has
    the text with its unit, not the number.
    """

    type: Any = str
    metavar = "TEXT"
    expected = "text on one line"
    repeats = False
    has_unit = False

    def parse(self, value: Any) -> T:
        """The value in its own form, from that form or from text. Raises if it is neither."""
        return cast(T, msgspec.convert(value, self.type, strict=False))

    def checked(self, what: str, value: object) -> T:
        """As `parse`. UsageError names `what`, the value and what is expected."""
        try:
            return self.parse(value)
        except (TypeError, ValueError, LookupError, OverflowError, AttributeError):
            raise UsageError(f"{what} {_shown(value)}: expected {self.expected}") from None

    def asked(self, what: str, value: object) -> T:
        """As `checked`, for a value that a person gives; a run may have further values."""
        return self.checked(what, value)

    def texts(self, value: Any) -> list[str]:
        """The texts that the option takes: one, or one for each time that the option is given."""
        if not isinstance(value, tuple):
            return [str(value)]
        parts = [str(part) for part in value]
        return parts if self.repeats else [",".join(parts)]

    def literal(self, value: Any) -> str:
        if isinstance(value, Mapping):
            pairs = (f"{quoted(name)}: {quoted(held)}" for name, held in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, tuple):
            alone = self.repeats and len(value) == 1
            return quoted(value[0]) if alone else f"[{', '.join(map(quoted, value))}]"
        return quoted(self.texts(value)[0] if self.has_unit else value)


def quoted(value: object) -> str:
    """repr() with double quotes if that is as short."""
    text = repr(value)
    plain = text.startswith("'") and '"' not in text and "\\" not in text
    return f'"{text[1:-1]}"' if plain else text


def _shown(value: object) -> str:
    """repr(), of the texts of an option that repeats without a tuple around them."""
    texts = isinstance(value, tuple) and value and all(isinstance(one, str) for one in value)
    return ", ".join(map(repr, cast("tuple[str, ...]", value))) if texts else repr(value)


def _number(value: Any) -> Any:
    """Convert a text of digits to a number; other values stay. Raises ValueError for other text."""
    if not isinstance(value, str):
        return value
    _require(value.isascii() and value.strip().isdigit())
    return int(value)


def _require(holds: object) -> None:
    if not holds:
        raise ValueError


def _parts(pattern: str, text: str) -> tuple[str | Any, ...]:
    """The groups of a pattern that matches the whole text, without blanks around the text."""
    found = re.fullmatch(pattern, text.strip())
    if not found:
        raise ValueError(text)
    return found.groups()


def _listed(value: Any) -> Any:
    """The members of a text with commas; any other value stays."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class Text(Kind[str]):
    """One line of at least `least` printable characters."""

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def parse(self, value: Any) -> str:
        _require(isinstance(value, str) and value.isprintable() and len(value) >= self.least)
        return str(value)


class Words(Kind["tuple[str, ...]"]):
    type = tuple[str, ...]
    expected = "the words of a command"
    repeats = True

    def parse(self, value: Any) -> tuple[str, ...]:
        return tuple(map(Text(0).parse, super().parse(value)))


class SingleChoice(Kind[str]):
    """One of some names. `others`: pattern of further names, which only a run may have."""

    def __init__(self, names: Sequence[str], others: str = "(?!)") -> None:
        self.names, self.others = tuple(names), others
        self.metavar = "|".join(names)
        self.expected = f"one of {', '.join(names)}"

    def parse(self, value: Any) -> str:
        name = str(value).removeprefix("torch.")
        _require(name in self.names or re.fullmatch(self.others, name))
        return name

    def asked(self, what: str, value: object) -> str:
        return SingleChoice(self.names).checked(what, value)


class MultiChoice(Kind["tuple[str, ...]"]):
    """One or more of some names, in the order of `names`; as text, separated by commas."""

    metavar = "LIST"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.expected = f"some of {', '.join(names)}"

    def parse(self, value: Any) -> tuple[str, ...]:
        taken = set(map(SingleChoice(self.names).parse, _listed(value)))
        _require(taken)
        return tuple(name for name in self.names if name in taken)


class Switch(Kind[bool]):
    metavar = ""
    expected = "True or False"

    def parse(self, value: Any) -> bool:
        return msgspec.convert(value, bool)


class Whole(Kind[int]):
    metavar = "N"

    def __init__(self, least: int = 1) -> None:
        self.type = Annotated[int, Meta(ge=least, le=MAX_NUMBER)]
        self.expected = f"a number from {least} to {MAX_NUMBER}"

    def parse(self, value: Any) -> int:
        return super().parse(_number(value))


class Fraction(Kind[float]):
    type = Annotated[float, Meta(ge=0, lt=1)]
    metavar = "FRACTION"
    expected = "a fraction such as 0.02"


class DeviceName(Kind[str]):
    type = Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,4})?)\Z")]
    metavar = "cuda:N|cpu"
    expected = "cpu, cuda or cuda:N, e.g. cuda:0"

    def parse(self, value: Any) -> str:
        return super().parse(str(value))


class Numbers(Kind["tuple[int, ...]"]):
    """Whole numbers from 1, sorted; as text, separated by commas."""

    type = Annotated[tuple[_Number, ...], Meta(max_length=MAX_NUMBERS)]
    metavar = "16,32,64"
    expected = f"up to {MAX_NUMBERS} numbers of at least 1, as 16,32,64"

    def parse(self, value: Any) -> tuple[int, ...]:
        return tuple(sorted({*super().parse([*map(_number, _listed(value))])}))


class ByteSize(Kind[int]):
    """'20GiB', '512MB' or a number of bytes."""

    metavar = "SIZE"
    has_unit = True
    expected = "a positive size such as 40GiB or 512MiB"

    def parse(self, value: Any) -> int:
        number, prefix, unit = _parts(r"([\d.]+)\s*([kmgt]?)(ib|b)?", str(value).lower())
        base = 1000 if unit == "b" else 1024
        size = int(float(number) * base ** " kmgt".index(prefix or " "))
        _require(0 < size < 2**63)
        return size

    def texts(self, value: int) -> list[str]:
        for power, unit in ((3, "GiB"), (2, "MiB")):
            if value % 1024**power == 0:
                return [f"{value // 1024**power}{unit}"]
        return [str(value)]


class Duration(Kind[float]):
    """A time above zero: seconds, or '50ms', '90s', '1h30m', '30d'."""

    metavar = "TIME"
    has_unit = True
    expected = "a time above zero, as 90s, 5m or 1h30m"

    def parse(self, value: Any) -> float:
        number = r"(\d+(?:\.\d+)?)"
        units = {"d": 86400.0, "h": 3600.0, "m": 60.0, "ms": 1e-3, "s": 1.0}
        alone = rf"(?:(?<![a-z]){number})?"
        parts = _parts("".join(f"(?:{number}{unit})?" for unit in units) + alone, str(value))
        pairs = zip((*units.values(), 1.0), parts, strict=True)
        total = sum(unit * float(part or 0) for unit, part in pairs)
        _require(0 < total < 1e9)
        return total

    def texts(self, value: Any) -> list[str]:
        return [f"{value:g}s"]


_Shape = Annotated[tuple[_Number, ...], Meta(min_length=2, max_length=16)]
Shape = Sequence[int] | str  # (64, 3, 256, 256) or '64x3x256x256': a batch and a sample


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
        split = (one.lower().split("x") if isinstance(one, str) else one for one in parts)
        found = super().parse([[*map(_number, one)] for one in split])
        if not len(found) == len(set(found)) <= MAX_SHAPES or len({*map(len, found)}) > 1:
            raise UsageError(
                f"shapes {value!r}: expected up to {MAX_SHAPES} different shapes with the same "
                "number of dimensions"
            )
        return tuple(sorted(found, key=lambda one: (-math.prod(one), one)))

    def texts(self, value: Any) -> list[str]:
        return ["x".join(map(str, shape)) for shape in value]


class Arguments(Kind[Config]):
    """Keyword arguments by name, as a mapping or as texts 'NAME=VALUE'."""

    metavar = "NAME=VALUE"
    expected = "NAME=VALUE, each name once, e.g. num_classes=10"
    repeats = True

    def parse(self, value: Any) -> Config:
        if not isinstance(value, Mapping):
            split = [text.split("=", 1) for text in ([value] if isinstance(value, str) else value)]
            value = {name: _value(rest) for name, rest in split}
            _require(len(value) == len(split))
        _require(all(name.isidentifier() for name in value))
        return Config(value)

    def texts(self, value: Config) -> list[str]:
        return [f"{name}={_written(held)}" for name, held in value.items()]


class Options(Arguments):
    """Options of a script, by the knob that each sets."""

    metavar = "KNOB=OPTION"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.expected = f"KNOB=OPTION, e.g. batch=--batch-size; KNOB is one of {', '.join(names)}"

    def parse(self, value: Any) -> Config:
        found = super().parse(value)
        _require(set(found) <= set(self.names))
        _require(all(re.fullmatch(r"--?[A-Za-z][\w.-]{0,99}", str(v)) for v in found.values()))
        return found


def _written(value: Value) -> str:
    """A value as text that `_value` converts back."""
    if isinstance(value, str):
        return f'"{value}"' if _value(value) != value else value
    return "none" if value is None else str(value)


def _value(text: str) -> Value:
    """The value of a text: a number, true, false, none, or else text, with or without "quotes"."""
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return text[1:-1]
    known: dict[str, Value] = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text
