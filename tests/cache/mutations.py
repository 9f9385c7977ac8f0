"""Byte strings to fuzz the decoder with: random ones, and mutations of a corpus."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace

import msgpack

from advisor.cache.codec import FORMAT, encode, make_envelope, to_plain
from advisor.cache.signing import KeyRing
from tests.cache.examples import DEFAULT, choice, record

HEADERS = (
    b"\xdd\xff\xff\xff\xff",  # list, map, text and bytes of length 2**32 - 1
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdd\x00\x00\x07\xff",  # the longest allowed list
    b"\xc7\x08\xff",  # an extension type
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xc1",
)


def corpus() -> list[bytes]:
    """Encoded records: small, large, signed, of a later version, stale, with an odd config."""
    one = record()
    later = to_plain(one)
    later["later"] = {"deep": [1, 2]}
    later["provenance"]["cluster"] = "eu"
    return [
        encode(one),
        encode(record(trials=12)),
        encode(one, KeyRing(b"a secret of a team")),
        make_envelope(msgpack.packb(later)),
        encode(replace(one, baseline=choice(DEFAULT.replace(compile="../../x")))),
        encode(replace(one, stale="slower now", revised=1.74e9, family="0123456789ab")),
    ]


def mutated(seeds: list[bytes], dice: random.Random) -> Iterator[bytes]:
    """An endless stream of byte strings. About half have a valid checksum, so that the decoder
    reads their content."""
    payloads = [data for seed in seeds if (data := _payload(seed))]
    while True:
        kind = dice.random()
        if kind < 0.1:
            yield dice.randbytes(dice.randrange(200))
        elif kind < 0.45:
            yield _mutate(dice.choice(seeds), seeds, dice)
        else:
            payload = _mutate(dice.choice(payloads), payloads, dice)
            if kind > 0.98:  # repetition: nested lists, long lists
                payload = payload[: dice.randrange(40)]
                payload += dice.choice(HEADERS) * dice.randrange(2000)
            yield msgpack.packb(
                {"format": FORMAT, "record": payload, "sha256": hashlib.sha256(payload).digest()}
            )


def _payload(seed: bytes) -> bytes:
    return bytes(msgpack.unpackb(seed)["record"])


def _mutate(data: bytes, others: list[bytes], dice: random.Random) -> bytes:
    result = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4, 16))):
        at = dice.randrange(len(result) + 1)
        how = dice.randrange(6)
        if how == 0 and at < len(result):
            result[at] ^= 1 << dice.randrange(8)
        elif how == 1 and at < len(result):
            result[at] = dice.randrange(256)
        elif how == 2:
            result[at:at] = dice.choice(HEADERS)
        elif how == 3:
            del result[at : at + dice.randrange(1, 20)]
        elif how == 4:
            other = dice.choice(others)
            start = dice.randrange(len(other))
            result[at:at] = other[start : start + dice.randrange(1, 400)]
        else:
            del result[at:]
    return bytes(result)
