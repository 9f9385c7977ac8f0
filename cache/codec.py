"""Records to msgpack bytes and back; nothing that was not checked comes back."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import reprlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgpack
import msgspec

from advisor.cache.config import Config
from advisor.cache.domain import LONGEST, is_line, line
from advisor.cache.record import Record
from advisor.cache.seal import UNSEALED, Seal
from advisor.cache.stores.store import MAX_BYTES as MAX_BYTES
from advisor.cache.turns import check_consistency
from advisor.errors import RecordDamaged, RecordNewer, UsageError

FORMAT = 3
"""Of what is written. A field that is added needs no other format: older records mean its default,
and older versions ignore it."""
OLDEST = 3
"""The oldest format that is read."""

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

_LINE = f"one line of at most {LONGEST} printable characters"
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a map",
}
"""Types as msgspec names them, for people."""

_DESCRIBING = threading.Lock()
_described: set[type] = set()

T = TypeVar("T")


def encode(record: Record, seal: Seal = UNSEALED, *, revises: bytes = b"") -> bytes:
    """The record as msgpack bytes, every text as one printable line.

    If it would be too large, raw seconds per block go first, then the slowest trials.

    Args:
        seal: signs it, if it has a key.
        revises: the encoded record that this one was made from. Fields of a newer version in it
            are carried over.

    Raises:
        RecordDamaged: `decode` would refuse it, e.g. for a number that is not finite.
    """
    old = _plain_in(_payload(_envelope(revises))) if revises else {}
    known = plain(from_plain(Record, old)) if revises else {}
    for fitting in _smaller(record):
        content = plain(fitting)
        _carry(old, known, content)
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
    check_consistency(record)
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
    if found["format"] < OLDEST:
        raise RecordDamaged(
            f"record: format {found['format']} is no longer read, {OLDEST} is; tune again"
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


def _carry(old: Any, known: Any, new: Any) -> None:
    """Take over from `old` plain data what is not in `known`, as this version reads it.

    Members of a list are paired by place, and only where they are otherwise the same.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name, value in old.items():
            if name not in known:
                new[name] = value
            elif name in new:
                _carry(value, known[name], new[name])
    elif isinstance(old, list) and isinstance(new, list):
        for before, read, after in zip(old, known, new, strict=False):
            if read == after:
                _carry(before, read, after)


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
    return {name: to_plain(getattr(value, name)) for name in cls.__dataclass_fields__}


def _describe(cls: type) -> None:
    """Have msgspec look at a class: it crashes if two threads do that first at once."""
    with _DESCRIBING:
        if cls not in _described:
            msgspec.json.Decoder(cls, dec_hook=_config)
            _described.add(cls)


def from_plain(cls: type[T], data: object) -> T:
    """The inverse of `to_plain` for a dataclass `cls`.

    Fields that are missing get their default; those that `cls` does not have are ignored.

    Raises:
        RecordDamaged: data is not what cls needs; says which field is wrong.
    """
    what = cls.__name__.lower()
    if cls not in _described:
        _describe(cls)
    for place, text in _texts(data):
        if not is_line(text):
            raise _unexpected(what + _path(place), _LINE, text)
    try:
        return msgspec.convert(data, cls, dec_hook=_config)
    except msgspec.ValidationError as exc:
        raise _refused(what, str(exc), data) from None


def _config(_cls: type, value: object) -> Config:
    """Build the only field type that msgspec does not know."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a config, got {reprlib.repr(value)}")
    try:
        return Config(value)
    except UsageError as exc:
        raise ValueError(str(exc)) from None


# msgspec describes a class at its first use, and crashes if two threads use it first at once.
msgspec.json.Decoder(Record, dec_hook=_config)


def _texts(data: object) -> Iterator[tuple[Any, str]]:
    """Every text in plain data, once, with its place: the place around it, and a name or index."""
    seen: set[str] = set()
    left: list[tuple[Any, Any]] = [((), data)] if isinstance(data, dict | list) else []
    while left:
        place, value = left.pop()
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            for text in (name, part):
                if type(text) is str and text not in seen:
                    seen.add(text)
                    yield (place, name), text
            if type(part) is dict or type(part) is list:
                left.append(((place, name), part))


def _path(place: Any) -> str:
    parts = []
    while place:
        place, part = place
        parts.append(f"[{part}]" if isinstance(part, int) else f".{part}")
    return line("".join(reversed(parts)))[:200]


def _refused(what: str, said: str, data: Any) -> RecordDamaged:
    """What msgspec said of data: 'Expected `int` >= 1 - at `$.baseline.batch`' and the like."""
    reason, _, path = said.rpartition(" - at `$") if " - at `$" in said else (said, "", "")
    path = path.removesuffix("`")
    if not reason.startswith("Expected"):
        return RecordDamaged(f"{what}{path}: {line(reason)[:200]}")
    with contextlib.suppress(LookupError, TypeError):
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
            data = data[name or int(index)]
    wanted = reason.removeprefix("Expected ").partition(", got ")[0]
    for name, plainly in _TYPES.items():
        wanted = wanted.replace(f"`{name}`", plainly)
    return _unexpected(what + path, wanted, data)


def _unexpected(where: str, wanted: str, value: object) -> RecordDamaged:
    return RecordDamaged(f"{where}: expected {wanted}, got {reprlib.repr(value)[:40]}")
