"""Kinds of values as people write them: how each is checked, and written again for copying."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from advisor.cache.config import Config, Value
from advisor.errors import UsageError

MOST = 2**31 - 1
"""The largest number taken anywhere: far above any that is meant, and safe to compute with."""
MOST_SHAPES = 8
MOST_LISTED = 64

T = TypeVar("T")


class Kind(Generic[T]):
    """How one kind of value is checked and written.

    `metavar`: what stands for a value in help; `repeats`: the option may be given again.
    """

    metavar = "TEXT"
    repeats = False

    def checked(self, what: str, value: object) -> T:
        """The value in its own form, from that form or from text.

        Raises:
            UsageError: it is outside the domain; names `what`, the value and what is allowed.
        """
        raise NotImplementedError

    def asked(self, what: str, value: object) -> T:
        """The same of what a person gives, which may be less than what is seen in a run."""
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
    """repr() with double quotes, where that is as short."""
    text = repr(value)
    if text.startswith("'") and '"' not in text and "\\" not in text:
        return f'"{text[1:-1]}"'
    return text


class Text(Kind[str]):
    """One line of printable characters."""

    def checked(self, what: str, value: object) -> str:
        if not isinstance(value, str) or not value or not value.isprintable():
            raise UsageError(f"{what} {value!r}: expected text on one line")
        return value


class Choice(Kind[str]):
    """One of some names."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.metavar = "|".join(self.names)

    def checked(self, what: str, value: object) -> str:
        name = str(value).removeprefix("torch.")
        if name not in self.names:
            raise UsageError(f"{what} {value!r}: expected one of {', '.join(self.names)}")
        return name


class Known(Choice):
    """One of some names, or what else is seen in a run: the names are those that advisor makes."""

    def checked(self, what: str, value: object) -> str:
        if isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_]{0,31}", value):
            return value
        return super().checked(what, value)

    def asked(self, what: str, value: object) -> str:
        return super().checked(what, value)


class Line(Text):
    """One line of printable characters, or none."""

    def checked(self, what: str, value: object) -> str:
        return "" if value == "" else super().checked(what, value)


class Words(Kind["tuple[str, ...]"]):
    """The words of a command."""

    repeats = True

    def checked(self, what: str, value: object) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UsageError(f"{what} {value!r}: expected the words of a command")
        return tuple(Line().checked(what, one) for one in value)


class MultiChoice(Choice):
    """Some of some names, in their own order; as text with commas between."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.metavar = "LIST"

    def checked(self, what: str, value: object) -> tuple[str, ...]:  # type: ignore[override]
        listed = value.split(",") if isinstance(value, str) else value
        if not isinstance(listed, Sequence) or not listed:
            raise UsageError(f"{what} {value!r}: expected some of {', '.join(self.names)}")
        taken = {super(MultiChoice, self).checked(what, _stripped(name)) for name in listed}
        return tuple(name for name in self.names if name in taken)


def _stripped(name: object) -> object:
    return name.strip() if isinstance(name, str) else name


class Switch(Kind[bool]):
    """On or off."""

    metavar = ""

    def checked(self, what: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise UsageError(f"{what} {value!r}: expected True or False")
        return value


class Whole(Kind[int]):
    """A whole number."""

    metavar = "N"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def checked(self, what: str, value: object) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if type(number) is not int or not self.least <= number <= MOST:
            raise UsageError(f"{what} {value!r}: expected a number from {self.least} to {MOST}")
        return number


class Fraction(Kind[float]):
    """A number from 0 to below 1."""

    metavar = "FRACTION"

    def checked(self, what: str, value: object) -> float:
        try:
            number = float(cast(Any, value))
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number < 1:
            raise UsageError(f"{what} {value!r}: expected a fraction such as 0.02")
        return number


class Device(Kind[str]):
    """'cpu', 'cuda' or 'cuda:N'; '' where nothing is said."""

    metavar = "cuda:N|cpu"

    def checked(self, what: str, value: object) -> str:
        name = str(value)
        if re.fullmatch(r"(cuda:)?all|cuda:[0-9]+[-,][-,0-9]*", name):
            raise UsageError(f"{what} {value!r}: tune measures on one device; give one, as cuda:0")
        if not re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", name):
            raise UsageError(f"{what} {value!r}: expected cpu, cuda or cuda:N, e.g. cuda:0")
        return name


class Numbers(Kind["tuple[int, ...] | None"]):
    """Whole numbers from 1, sorted; as text with commas between."""

    metavar = "16,32,64"

    def checked(self, what: str, value: object) -> tuple[int, ...]:
        listed = value.split(",") if isinstance(value, str) else value
        if not isinstance(listed, Sequence) or len(listed) > MOST_LISTED:
            raise UsageError(f"{what} {value!r}: expected numbers of at least 1, as {self.metavar}")
        return tuple(sorted({Whole().checked(what, _stripped(one)) for one in listed}))


class Bytes(Kind[int]):
    """'20GiB', '512MB' or a number of bytes; 0 is no limit."""

    metavar = "SIZE"

    def checked(self, what: str, value: object) -> int:
        units = {"": 1, "b": 1}
        for power, prefix in enumerate("kmgt", start=1):
            units |= {f"{prefix}ib": 1024**power, f"{prefix}b": 1000**power, prefix: 1024**power}
        text = str(value).strip().lower()
        number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
        try:
            size = int(float(number) * units[text[len(number) :].strip()])
        except (ValueError, KeyError, OverflowError):
            size = 0
        if not 0 < size < 2**63:
            raise UsageError(f"{what} {value!r}: expected a positive size such as 40GiB or 512MiB")
        return size

    def texts(self, value: int) -> list[str]:
        for power, unit in ((3, "GiB"), (2, "MiB")):
            if value % 1024**power == 0:
                return [f"{value // 1024**power}{unit}"]
        return [str(value)]

    def literal(self, value: int) -> str:
        return f'"{self.texts(value)[0]}"'


class Seconds(Kind["float | None"]):
    """A time above zero: seconds, or '90s', '5m', '1h30m'."""

    metavar = "TIME"

    def checked(self, what: str, value: object) -> float:
        parts = re.fullmatch(
            r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", str(value).strip()
        )
        numbers = [float(part or 0) for part in parts.groups()] if parts else [0.0]
        total = sum(number * unit for number, unit in zip(numbers, (3600, 60, 1), strict=False))
        if not 0 < total < 1e9:
            raise UsageError(f"{what} {value!r}: expected a time above zero, as 90s, 5m or 1h30m")
        return total

    def texts(self, value: Any) -> list[str]:
        return [f"{value:g}s"]

    def literal(self, value: Any) -> str:
        return f'"{value:g}s"'


Shape = Sequence[int] | str
"""(64, 3, 256, 256) or '64x3x256x256': a batch and a sample."""


class Shapes(Kind["tuple[tuple[int, ...], ...]"]):
    """One shape, or two to eight that a job's inputs alternate between, the largest first."""

    metavar = "BATCHxSAMPLE"
    repeats = True

    def checked(self, what: str, value: object) -> tuple[tuple[int, ...], ...]:
        parts = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        if parts is value and all(isinstance(one, int) or str(one).isdigit() for one in parts):
            parts = [parts]
        found = [_shape(part) for part in parts]
        listed = ", ".join("x".join(map(str, one)) for one in found)
        if not 1 <= len(found) <= MOST_SHAPES:
            raise UsageError(f"shapes {listed}: expected one to {MOST_SHAPES}, got {len(found)}")
        if len(set(found)) < len(found):
            raise UsageError(f"shapes {listed}: one is given twice; give each once")
        if len({len(one) for one in found}) > 1:
            raise UsageError(f"shapes {listed}: expected the same number of dimensions in all")
        return tuple(sorted(found, key=lambda one: (-math.prod(one), one)))

    def texts(self, value: Any) -> list[str]:
        return ["x".join(map(str, shape)) for shape in value]

    def literal(self, value: Any) -> str:
        return str(value[0]) if len(value) == 1 else str(list(value))


def _shape(value: object) -> tuple[int, ...]:
    parts = value.lower().split("x") if isinstance(value, str) else value
    try:
        numbers = tuple(int(part) for part in cast(Any, parts))
    except (TypeError, ValueError):
        numbers = ()
    if not 2 <= len(numbers) <= 16 or not all(1 <= number <= MOST for number in numbers):
        raise UsageError(
            f"shape {value!r}: expected a batch and a sample, each number from 1 to {MOST}, "
            "e.g. 64x3x256x256"
        )
    return numbers


class _Pairs(Kind[Config]):
    """Values by name, as a mapping or as texts 'NAME=VALUE'."""

    metavar = "NAME=VALUE"
    repeats = True
    example: str

    def checked(self, what: str, value: object) -> Config:
        found = {}
        for name, held in self._pairs(what, value):
            self.check(what, name, held)
            if name in found:
                raise UsageError(f"{what}: {name} is given twice; give it once")
            found[name] = held
        return Config(found)

    def check(self, what: str, name: object, held: object) -> None:
        """Raise UsageError where one is none of these."""
        raise NotImplementedError

    def _pairs(self, what: str, value: object) -> Iterator[tuple[str, Value]]:
        if isinstance(value, Mapping):
            yield from value.items()
            return
        several = isinstance(value, Sequence) and not isinstance(value, str)
        for text in cast(Sequence[object], value) if several else (value,):
            name, equals, rest = text.partition("=") if isinstance(text, str) else ("", "", "")
            if not equals:
                raise UsageError(f"{what} {text!r}: expected {self.metavar}, e.g. {self.example}")
            yield name, self.read(rest)

    def read(self, text: str) -> Value:
        """A value, from what stands behind '='."""
        return text

    def texts(self, value: Config) -> list[str]:
        return [f"{name}={_written(held)}" for name, held in value.items()]

    def literal(self, value: Config) -> str:
        return f"{{{', '.join(f'{_quoted(name)}: {_quoted(v)}' for name, v in value.items())}}}"


class Arguments(_Pairs):
    """Keyword arguments."""

    example = "num_classes=10"

    def check(self, what: str, name: object, held: object) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"{what} {name!r}: expected a name, e.g. num_classes")

    def read(self, text: str) -> Value:
        return _value(text)


class Options(_Pairs):
    """Options of a script, by what they set."""

    metavar = "KNOB=OPTION"
    example = "batch=--batch-size"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def check(self, what: str, name: object, held: object) -> None:
        if name not in self.names:
            raise UsageError(f"{what} {name!r}: expected one of {', '.join(self.names)}")
        if not isinstance(held, str) or not re.fullmatch(r"--?[A-Za-z][\w.-]{0,99}", held):
            raise UsageError(f"{what} {held!r}: expected an option, e.g. {self.example}")


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
        try:
            return number(text)
        except ValueError:
            continue
    return text
