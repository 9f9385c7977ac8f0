"""Records to msgpack bytes and back; nothing that was not checked comes back."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgpack

from advisor.cache.config import Config
from advisor.cache.record import Record
from advisor.errors import RecordDamaged, UsageError

FORMAT = 1

UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Format number → what makes a record's plain data of that format one of the next."""

MAX_BYTES = 64 * 2**20
_LIMITS = {
    "max_str_len": 2**20,
    "max_bin_len": 0,
    "max_array_len": 2**17,
    "max_map_len": 2**10,
    "max_ext_len": 0,
}

T = TypeVar("T")
_Read = Callable[[Any], Any]


def encode(record: Record) -> bytes:
    """The record as msgpack bytes; text that is no Unicode gets '?'.

    Raises:
        RecordDamaged: `decode` would refuse it, e.g. for a number that is not finite.
    """
    envelope = {"format": FORMAT, "record": plain(record)}
    try:
        data: bytes = msgpack.packb(envelope, use_bin_type=True, unicode_errors="replace")
    except (TypeError, ValueError, OverflowError) as exc:
        raise RecordDamaged(f"record: cannot be stored: {exc}") from exc
    decode(data)
    return data


def decode(data: bytes) -> Record:
    """The record in these bytes; fields that this version does not know are ignored.

    Raises:
        RecordDamaged: they hold none; says which field is wrong.
    """
    if len(data) > MAX_BYTES:
        raise RecordDamaged(f"record: {len(data)} bytes, expected at most {MAX_BYTES}")
    try:
        envelope = msgpack.unpackb(data, raw=False, strict_map_key=True, **_LIMITS)
    except Exception as exc:  # msgpack raises more kinds than it documents
        reason = str(exc).splitlines()[0][:80] if str(exc) else type(exc).__name__
        raise RecordDamaged(f"record: not msgpack ({reason})") from exc
    if not isinstance(envelope, dict) or type(envelope.get("format")) is not int:
        raise RecordDamaged("record: format: missing")
    number, content = envelope["format"], envelope.get("record")
    if number > FORMAT:
        raise RecordDamaged(
            f"record: format {number} is newer than {FORMAT}, which this version reads; "
            "upgrade advisor"
        )
    while number < FORMAT:
        if number not in UPGRADES or not isinstance(content, dict):
            raise RecordDamaged(f"record: format {number} is unknown; expected 1 to {FORMAT}")
        content, number = UPGRADES[number](content), number + 1
    return from_plain(Record, content)


def plain(record: Record) -> dict[str, Any]:
    """The record as dicts, lists, text and numbers, ready for JSON."""
    found: dict[str, Any] = to_plain(record)
    return found


def to_plain(value: object) -> Any:
    """A dataclass of the cache, or a value in it, as dicts, lists, text and numbers."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return [to_plain(part) for part in value]
    cls: Any = type(value)
    return {name: to_plain(getattr(value, name)) for name in _names(cls)}


def from_plain(cls: type[T], data: object) -> T:
    """The inverse of `to_plain` for a dataclass `cls`.

    Raises:
        RecordDamaged: data is not what cls needs; says which field is wrong.
    """
    hint: Any = cls
    try:
        found: T = _reader(hint)(data)
    except _Wrong as exc:
        where = ".".join([cls.__name__.lower(), *reversed(exc.path)])
        raise RecordDamaged(f"{where}: {exc.reason}") from None
    return found


class _Wrong(Exception):
    """Something in the data is wrong; `path` grows from the inside outward."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.path: list[str] = []


def _unexpected(wanted: str, value: object) -> _Wrong:
    return _Wrong(f"expected {wanted}, got {repr(value)[:40]}")


@functools.cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


@functools.cache
def _reader(hint: Any) -> _Read:
    """The function that checks and builds a value of this type hint."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    if dataclasses.is_dataclass(hint):
        return _dataclass_reader(typing.cast(type, hint))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments[1:] == (...,):
        return _tuple_reader(_reader(arguments[0]))
    if origin is types.UnionType and len(arguments) == 2 and arguments[1] is types.NoneType:
        return _optional_reader(_reader(arguments[0]))
    raise TypeError(f"no reader for {hint}")


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _unexpected("text", value)
    return value


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise _unexpected("an integer", value)
    return value


def _number(value: Any) -> float:
    if type(value) is int:
        return float(value) if abs(value) < 2**64 else _number(None)
    if type(value) is not float or not math.isfinite(value):
        raise _unexpected("a finite number", value)
    return value


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise _unexpected("true or false", value)
    return value


def _config(value: Any) -> Config:
    if type(value) is not dict:
        raise _unexpected("a config", value)
    try:
        return Config(value)
    except UsageError as exc:
        raise _Wrong(str(exc)) from None


_SCALARS: dict[Any, _Read] = {
    str: _text,
    int: _integer,
    float: _number,
    bool: _truth,
    Config: _config,
}


def _optional_reader(read: _Read) -> _Read:
    return lambda value: None if value is None else read(value)


def _tuple_reader(read: _Read) -> _Read:
    def parts(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _unexpected("a list", value)
        found = []
        try:
            for part in value:
                found.append(read(part))
        except _Wrong as exc:
            exc.path.append(str(len(found)))
            raise
        return tuple(found)

    return parts


def _dataclass_reader(cls: type) -> _Read:
    hints = typing.get_type_hints(cls)
    readers = [(name, _reader(hints[name])) for name in _names(cls)]
    optional = {f.name for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}

    def build(value: Any) -> Any:
        if type(value) is not dict:
            raise _unexpected("a map", value)
        found: dict[str, Any] = {}
        for name, read in readers:
            try:
                found[name] = read(value[name])
            except KeyError:
                if name not in optional:
                    raise _Wrong(f"{name} is missing") from None
            except _Wrong as exc:
                exc.path.append(name)
                raise
        try:
            return cls(**found)
        except ValueError as exc:
            raise _Wrong(str(exc)) from None

    return build
