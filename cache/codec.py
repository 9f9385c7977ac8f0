"""Encodes records as msgpack and decodes them. RecordDamaged says why data is refused."""

from __future__ import annotations

import hashlib
import reprlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgpack
import msgspec

from advisor.cache.config import Config
from advisor.cache.domain import LONGEST, is_line, line
from advisor.cache.record import Record, contradictions
from advisor.cache.signing import NO_KEYS, KeyRing
from advisor.cache.stores.store import MAX_BYTES as MAX_BYTES
from advisor.errors import RecordDamaged, RecordNewer, UsageError

FORMAT = 3
"""The format that this version writes. A new field needs no new format: older records mean its
default, and older versions ignore the field."""
OLDEST = 3

MAX_PARTS = 2**16
MAX_TRIALS = 2**11 - 1
_lock = threading.Lock()
_described: set[type] = set()

T = TypeVar("T")


class Envelope(msgspec.Struct, frozen=True):
    """An encoded record with its checksum and, if it is signed, its signature."""

    record: bytes
    sha256: bytes
    hmac: bytes = b""


def encode(record: Record, keyring: KeyRing = NO_KEYS) -> bytes:
    """The record as msgpack bytes, every text as one printable line, signed if there is a key. One
    that would be too large loses the raw seconds of its blocks, then its slowest trials."""
    for fitting in _smaller(record):
        payload = _pack(to_plain(fitting))
        if len(payload) <= MAX_BYTES - 2**10 and len(fitting.trials) <= MAX_TRIALS:
            break
    decode(data := make_envelope(payload, keyring))
    return data


def decode(data: bytes, keyring: KeyRing = NO_KEYS) -> Record:
    """The record in these bytes, without fields that this version does not know."""
    return decode_signed(data, keyring)[0]


def decode_signed(data: bytes, keyring: KeyRing = NO_KEYS) -> tuple[Record, bool]:
    """As `decode`, and whether one of the keys signed it."""
    payload, signed = open_envelope(data, keyring)
    record = from_plain(Record, unpack(payload))
    if wrong := next(contradictions(record), ""):
        raise RecordDamaged(f"record: {wrong}; refused")
    return record, signed


def make_envelope(payload: bytes, keyring: KeyRing = NO_KEYS) -> bytes:
    """The bytes with their checksum and, if there is a key, their signature."""
    envelope = {"format": FORMAT, "record": payload, "sha256": hashlib.sha256(payload).digest()}
    return _pack(envelope | ({"hmac": keyring.sign(payload)} if keyring.signs else {}))


def open_envelope(data: bytes, keyring: KeyRing = NO_KEYS) -> tuple[bytes, bool]:
    """The payload of an envelope, and whether one of the keys signed it."""
    found = unpack(data, max_bin_len=MAX_BYTES)
    format = found.get("format") if isinstance(found, dict) else None
    if type(format) is not int:
        raise RecordDamaged("record: format: missing")
    if format > FORMAT:
        raise RecordNewer(
            f"record: format {format} is newer than {FORMAT}, which this version reads; "
            "upgrade advisor"
        )
    if format < OLDEST:
        raise RecordDamaged(f"record: format {format} is older than {OLDEST}; tune again")
    envelope = from_plain(Envelope, found)
    if envelope.sha256 != hashlib.sha256(envelope.record).digest():
        raise RecordDamaged("record: its bytes do not match their checksum; it was cut or changed")
    signed = keyring.verify(envelope.hmac, envelope.record)
    if keyring.required and not signed:
        raise RecordDamaged(
            "record: signed with another secret, or changed since; refused"
            if envelope.hmac
            else "record: not signed, and only signed records are accepted"
        )
    return envelope.record, signed


def unpack(data: bytes, *, max_bin_len: int = 0) -> Any:
    """Plain data from msgpack, within the limits on size and on the number of parts."""
    if len(data) > MAX_BYTES:
        raise RecordDamaged(f"record: {len(data)} bytes, expected at most {MAX_BYTES}")
    left = MAX_PARTS

    def count(part: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {MAX_PARTS} lists and maps")
        return part

    try:
        return msgpack.unpackb(
            data,
            max_bin_len=max_bin_len,
            max_str_len=2**16,
            # msgpack allocates a list before it reads it, at each of 1,024 levels of nesting.
            max_array_len=MAX_TRIALS + 1,
            max_map_len=2**10,
            max_ext_len=0,
            object_hook=count,
            list_hook=count,
        )
    except Exception as exc:  # msgpack raises more types than it documents
        reason = str(exc).splitlines()[0][:80] if str(exc) else type(exc).__name__
        raise RecordDamaged(f"record: not msgpack ({reason})") from exc


def _pack(value: object) -> bytes:
    try:
        return bytes(msgpack.packb(value, unicode_errors="replace"))
    except (TypeError, ValueError, OverflowError) as exc:
        raise RecordDamaged(f"record: cannot be stored: {exc}") from exc


def _smaller(record: Record) -> Iterator[Record]:
    yield record
    # Trials of other stages go last: they are few, and the choice rests on them.
    bare = sorted(
        (replace(one, measurement=replace(one.measurement, blocks=())) for one in record.trials),
        key=lambda one: (one.stage == "compute", -one.measurement.samples_per_s),
    )
    while bare:
        yield replace(record, trials=tuple(sorted(bare, key=lambda one: one.number)))
        bare = bare[: len(bare) // 2]
    yield replace(record, trials=())


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


def describe(cls: type) -> None:
    """Have msgspec inspect a class once; msgspec crashes if two threads do so at the same time."""
    if cls not in _described:
        with _lock:
            msgspec.json.Decoder(cls, dec_hook=_config)
            _described.add(cls)


def from_plain(cls: type[T], data: object) -> T:
    """The inverse of `to_plain`. Fields that `cls` does not have are ignored."""
    describe(cls)
    what = cls.__name__.lower()
    for text in _texts(data):
        if not is_line(text):
            wanted = f"one line of at most {LONGEST} printable characters"
            raise RecordDamaged(f"{what}: expected {wanted}, got {reprlib.repr(text)[:40]}")
    try:
        return msgspec.convert(data, cls, dec_hook=_config)
    except msgspec.ValidationError as exc:
        reason, _, path = str(exc).partition(" - at `$")
    reason = line(reason[:1].lower() + reason[1:].replace("`", ""))[:200]
    raise RecordDamaged(f"{what}{line(path.rstrip('`'))[:200]}: {reason}")


def _config(_cls: type, value: object) -> Config:
    """Build a Config, the only field type that msgspec does not know."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a config, got {reprlib.repr(value)}")
    try:
        return Config(value)
    except UsageError as exc:
        raise ValueError(str(exc)) from None


def _texts(data: object) -> Iterator[str]:
    left = [data]
    while left:
        part = left.pop()
        if type(part) is str:
            yield part
        elif type(part) is dict:
            left += [*part, *part.values()]
        elif type(part) is list:
            left += part


describe(Record)
describe(Envelope)
