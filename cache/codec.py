"""Records to msgpack bytes and back; nothing that was not checked comes back."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import reprlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgpack

from advisor.cache.config import Config
from advisor.cache.domain import LONGEST, Domain, is_line, line
from advisor.cache.record import Record
from advisor.cache.seal import UNSEALED, Seal
from advisor.cache.task import Row, rows
from advisor.cache.turns import contradiction
from advisor.errors import RecordDamaged, RecordNewer, UsageError

FORMAT = 3

MAX_BYTES = 2**20
"""Of one encoded record. Real ones take 20-200 KB; small objects grow thirtyfold when decoded."""
MAX_PARTS = 2**16
"""Lists and maps in one record."""
MAX_TRIALS = 2**11 - 1
_LIMITS = {
    "max_str_len": 2**16,
    # msgpack makes room for a list before it has read it, at each of 1,024 levels of nesting.
    "max_array_len": MAX_TRIALS + 1,
    "max_map_len": 2**10,
    "max_ext_len": 0,
}

T = TypeVar("T")
_Read = Callable[[Any], Any]


def encode(record: Record, seal: Seal = UNSEALED, *, revises: bytes = b"") -> bytes:
    """The record as msgpack bytes; of text what can be printed on one line.

    Where it would be too large, raw seconds per block go first, then the slowest trials.

    Args:
        seal: signs it, if it has a key.
        revises: the encoded record that this one was made from: what a newer version of advisor
            put into it, and this one does not know, is carried over.

    Raises:
        RecordDamaged: `decode` would refuse it, e.g. for a number that is not finite.
    """
    unknown = _plain_in(_payload(_envelope(revises))) if revises else None
    for fitting in _smaller(record):
        content = plain(fitting)
        if unknown is not None:
            _carry(Record, unknown, content)
        payload = _packed(content)
        if len(payload) <= MAX_BYTES - 2**10:
            break
    data = enveloped(payload, seal)
    decode(data)
    return data


def decode(data: bytes, seal: Seal = UNSEALED) -> Record:
    """The record in these bytes; fields that this version does not know are ignored.

    Args:
        seal: if it asks for signatures, records without one by its keys are refused.

    Raises:
        RecordDamaged: they hold none; says which field is wrong.
    """
    return opened(data, seal)[0]


def opened(data: bytes, seal: Seal = UNSEALED) -> tuple[Record, bool]:
    """As `decode`, and whether one of the seal's keys signed it."""
    payload, signed = content(data, seal)
    record = from_plain(Record, _plain_in(payload))
    if found := contradiction(record):
        raise RecordDamaged(f"record: {found}; refused")
    return record, signed


def reason_of(stale: str, seal: Seal) -> bytes:
    """What a mark on a record holds: why it is stale, '' where it is not."""
    return enveloped(_packed({"stale": line(stale)}), seal)


def reason_in(data: bytes, seal: Seal) -> str:
    """The reason in a mark that one of the seal's keys signed.

    Raises:
        RecordDamaged: it is no such mark.
    """
    payload, signed = content(data, seal)
    found = _plain_in(payload)
    reason = found.get("stale") if isinstance(found, dict) else None
    if not signed or type(reason) is not str or not is_line(reason):
        raise RecordDamaged("mark: not signed by you or your team, or no mark; refused")
    return reason


def enveloped(payload: bytes, seal: Seal = UNSEALED) -> bytes:
    """Bytes beside their checksum and, where the seal has a key, their signature."""
    envelope = {"format": FORMAT, "record": payload, "sha256": hashlib.sha256(payload).digest()}
    if seal.signs:
        envelope["hmac"] = seal.mac(payload)
    return _packed(envelope)


def content(data: bytes, seal: Seal = UNSEALED) -> tuple[bytes, bool]:
    """What is in an envelope, and whether one of the seal's keys signed it.

    Raises:
        RecordDamaged: it was changed, or is not signed where that is asked for.
    """
    envelope = _envelope(data)
    payload = _payload(envelope)
    mac = envelope.get("hmac")
    signed = type(mac) is bytes and seal.made(mac, payload)
    if seal.required and not signed:
        raise RecordDamaged(
            "record: signed with another secret, or changed since; refused"
            if type(mac) is bytes
            else "record: not signed, and only signed records are accepted"
        )
    return payload, signed


def _envelope(data: bytes) -> dict[str, Any]:
    found = unpacked(data, max_bin_len=MAX_BYTES)
    if not isinstance(found, dict) or type(found.get("format")) is not int:
        raise RecordDamaged("record: format: missing")
    if found["format"] > FORMAT:
        raise RecordNewer(
            f"record: format {found['format']} is newer than {FORMAT}, which this version reads; "
            "upgrade advisor"
        )
    if found["format"] < FORMAT:
        raise RecordDamaged(
            f"record: format {found['format']} is no longer read, {FORMAT} is; tune again"
        )
    return found


def _payload(envelope: dict[str, Any]) -> bytes:
    payload = envelope.get("record")
    if type(payload) is not bytes:
        raise RecordDamaged("record: expected bytes in its envelope")
    if envelope.get("sha256") != hashlib.sha256(payload).digest():
        raise RecordDamaged("record: its bytes do not match their checksum; it was cut or changed")
    return payload


def _plain_in(payload: bytes) -> Any:
    return unpacked(payload, max_bin_len=0)


def unpacked(data: bytes, *, max_bin_len: int) -> Any:
    """Plain data from msgpack, within the limits of size, length and number.

    Raises:
        RecordDamaged: it is no msgpack, or too large.
    """
    if len(data) > MAX_BYTES:
        raise RecordDamaged(f"record: {len(data)} bytes, expected at most {MAX_BYTES}")
    left = MAX_PARTS

    def counted(part: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {MAX_PARTS} lists and maps")
        return part

    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_bin_len=max_bin_len,
            object_hook=counted,
            list_hook=counted,
            **_LIMITS,
        )
    except Exception as exc:  # msgpack raises more kinds than it documents
        reason = str(exc).splitlines()[0][:80] if str(exc) else type(exc).__name__
        raise RecordDamaged(f"record: not msgpack ({reason})") from exc


def _packed(value: object) -> bytes:
    try:
        data: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="replace")
    except (TypeError, ValueError, OverflowError) as exc:
        raise RecordDamaged(f"record: cannot be stored: {exc}") from exc
    return data


def _smaller(record: Record) -> Iterator[Record]:
    """The record, then ever smaller ones."""
    if len(record.trials) <= MAX_TRIALS:
        yield record
    bare = tuple(
        dataclasses.replace(trial, measurement=dataclasses.replace(trial.measurement, blocks=()))
        for trial in record.trials
    )
    # The other stages are few, and what the choice rests on.
    order = sorted(bare, key=lambda t: (t.stage == "compute", -t.measurement.samples_per_s))
    kept = min(len(order), MAX_TRIALS)
    while kept:
        chosen = sorted(order[:kept], key=lambda trial: trial.number)
        yield dataclasses.replace(record, trials=tuple(chosen))
        kept //= 2
    yield dataclasses.replace(record, trials=())


def _carry(cls: Any, old: Any, new: dict[str, Any]) -> None:
    """Take over from `old` plain data of a dataclass what its fields do not name, all the way in.

    Members of a tuple are paired by place, and only where they are otherwise the same.
    """
    if not isinstance(old, dict):
        return
    hints = typing.get_type_hints(cls)
    for name, value in old.items():
        if name not in hints:
            new[name] = value
            continue
        for inner in (hints[name], *typing.get_args(hints[name])):
            if not dataclasses.is_dataclass(inner) or new[name] is None:
                continue
            if isinstance(new[name], dict):
                _carry(inner, value, new[name])
            elif isinstance(value, list):
                for before, after in zip(value, new[name], strict=False):
                    kind: Any = inner
                    if to_plain(from_plain(kind, before)) == after:
                        _carry(inner, before, after)


def plain(record: Record) -> dict[str, Any]:
    """The record as dicts, lists, text and numbers, ready for JSON."""
    found: dict[str, Any] = to_plain(record)
    return found


def to_plain(value: object) -> Any:
    """A dataclass of the cache, or a value in it, as dicts, lists, numbers and lines of text."""
    if isinstance(value, str):
        return line(value)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {line(name): to_plain(part) for name, part in value.items()}
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
    return _Wrong(f"expected {wanted}, got {reprlib.repr(value)[:40]}")


@functools.cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


@functools.cache
def _reader(hint: Any) -> _Read:
    """The function that checks and builds a value of this type hint."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    if typing.get_origin(hint) is typing.Annotated:
        inner, domain = typing.get_args(hint)
        return _within(_reader(inner), domain)
    if dataclasses.is_dataclass(hint):
        return _dataclass_reader(typing.cast(type, hint))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments[1:] == (...,):
        return _tuple_reader(_reader(arguments[0]))
    if origin is types.UnionType and len(arguments) == 2 and arguments[1] is types.NoneType:
        return _optional_reader(_reader(arguments[0]))
    raise TypeError(f"no reader for {hint}")


def _within(read: _Read, domain: Domain) -> _Read:
    holds = domain.holds

    def checked(value: Any) -> Any:
        found = read(value)
        if not holds(found):
            raise _unexpected(domain.says, value)
        return found

    return checked


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _unexpected("text", value)
    if not (value.isprintable() and len(value) <= LONGEST):
        raise _unexpected(f"one line of at most {LONGEST} printable characters", value)
    return value


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise _unexpected("an integer", value)
    return value


def _number(value: Any) -> float:
    if type(value) is float and -math.inf < value < math.inf:
        return value
    if type(value) is int and abs(value) < 2**64:
        return float(value)
    raise _unexpected("a finite number", value)


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise _unexpected("true or false", value)
    return value


def _config(value: Any) -> Config:
    if type(value) is not dict:
        raise _unexpected("a config", value)
    try:
        texts = [*value, *(part for part in value.values() if type(part) is str)]
        if not is_line("".join(texts)):
            for text in texts:
                _text(text)
        return Config(value)
    except (TypeError, UsageError) as exc:
        raise _Wrong(line(str(exc))[:200]) from None


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


def _row_reader(row: Row, hint: Any) -> _Read:
    """Of a task's field: its kind knows the domain."""
    read = _reader(hint)

    def checked(value: Any) -> Any:
        found = read(value)
        try:
            if found != row.default and row.kind.checked(row.keyword, found) != found:
                raise _unexpected(f"what {row.keyword} may be", value)
        except UsageError as exc:
            if found not in row.switches.values():
                raise _Wrong(line(str(exc))[:200]) from None
        return found

    return checked


def _dataclass_reader(cls: type) -> _Read:
    hints = typing.get_type_hints(cls, include_extras=True)
    known = rows(cls)
    readers = [
        (name, _row_reader(known[name], hints[name]) if name in known else _reader(hints[name]))
        for name in _names(cls)
    ]
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


_reader(Record)  # made with the import, and not in the first lookup
