from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cache.codec import FORMAT, decode, encode, from_plain, plain, to_plain
from advisor.cache.record import OUTCOMES, STAGES, Choice, Measurement, Record, Trial
from advisor.errors import RecordDamaged
from tests.cache.examples import KEY, choice, record
from tests.cache.test_config import configs

numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**63)
measurements = st.builds(
    Measurement,
    outcome=st.sampled_from(OUTCOMES),
    reason=st.text(max_size=20),
    samples_per_s=numbers,
    low=numbers,
    high=numbers,
    peak_bytes=counts,
    steps=counts,
    blocks=st.lists(numbers, max_size=4).map(tuple),
)
trials = st.builds(
    Trial,
    number=counts,
    config=configs,
    measurement=measurements,
    stage=st.sampled_from(STAGES),
    origin=st.text(max_size=8),
    seconds=numbers,
)
choices = st.builds(
    Choice,
    config=configs,
    batch=st.integers(1, 4096),
    samples_per_s=numbers,
    low=numbers,
    high=numbers,
    speedup=numbers,
    speedup_low=numbers,
    speedup_high=numbers,
    peak_bytes=counts,
)
records = st.builds(
    lambda trials, free, at_batch, input: replace(
        record(), trials=tuple(trials), free=free, at_batch=at_batch, input=input
    ),
    st.lists(trials, max_size=4),
    st.none() | choices,
    choices,
    configs,
)
EXAMPLE = encode(record())


@given(records)
def test_round_trip(one: Record) -> None:
    assert decode(encode(one)) == one
    assert from_plain(Record, json.loads(json.dumps(plain(one)))) == one


@given(measurements)
def test_a_measurement_travels_alone(one: Measurement) -> None:
    assert from_plain(Measurement, to_plain(one)) == one


@given(st.binary(max_size=200))
def test_rubbish_is_damaged(data: bytes) -> None:
    with pytest.raises(RecordDamaged):
        decode(data)


@given(st.lists(st.tuples(st.integers(0, len(EXAMPLE) - 1), st.integers(0, 255)), max_size=4))
def test_mutated_bytes_decode_or_are_damaged(changes: list[tuple[int, int]]) -> None:
    data = bytearray(EXAMPLE)
    for place, value in changes:
        data[place] = value
    try:
        decode(bytes(data))
    except RecordDamaged as exc:
        assert "\n" not in str(exc)


@given(st.integers(0, len(EXAMPLE) - 1))
def test_cut_bytes_are_damaged(length: int) -> None:
    with pytest.raises(RecordDamaged):
        decode(EXAMPLE[:length])


def put(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(envelope: dict[str, Any]) -> None:
        *owners, name = path.split(".")
        here: Any = envelope
        for owner in owners:
            here = here[int(owner) if isinstance(here, list) else owner]
        here[name] = value

    return change


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda envelope: envelope["record"].pop(name)


MEASUREMENT = "record.trials.1.measurement"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("format", FORMAT + 1), "newer than 1.*upgrade advisor"),
        (put("format", 0), "format 0 is unknown"),
        (put("format", "1"), "format: missing"),
        (drop("target"), "target is missing"),
        (put("record", [1]), "expected a map"),
        (put("record.batch", True), r"record\.batch: expected an integer, got True"),
        (put("record.batch", 0), "batch 0: expected at least 1"),
        (put("record.key.sample.shape", [3, "x"]), r"key\.sample\.shape\.1: expected an integer"),
        (put("record.key.sample.shape", [-3]), "at least 1"),
        (put("record.key.permits.deterministic", 1), "expected true or false"),
        (put(f"{MEASUREMENT}.outcome", "splendid"), r"trials\.1\.measurement: outcome 'splendid'"),
        (put(f"{MEASUREMENT}.low", float("inf")), r"measurement\.low: expected a finite number"),
        (put(f"{MEASUREMENT}.low", "fast"), "expected a finite number, got 'fast'"),
        (put("record.input", {"a": [1]}), r"record\.input: config value a"),
        (put("record.baseline", None), r"record\.baseline: expected a map"),
        (put("record.target.name", "x" * (2**20 + 1)), "not msgpack"),
        (put("record.extra", msgpack.Timestamp(1)), "not msgpack"),
    ],
)
def test_names_what_is_wrong(change: Callable[[dict[str, Any]], None], says: str) -> None:
    envelope = {"format": FORMAT, "record": plain(record())}
    change(envelope)
    with pytest.raises(RecordDamaged, match=says):
        decode(msgpack.packb(envelope))


def test_tolerates() -> None:
    envelope: dict[str, Any] = {"format": FORMAT, "record": plain(record()), "later": 1}
    envelope["record"]["unknown"] = [1]
    envelope["record"]["baseline"]["speedup"] = 1  # an integer where a number is asked
    del envelope["record"]["trials"][0]["measurement"]["gpu_s"]  # has a default
    assert decode(msgpack.packb(envelope)) == record()


def test_what_could_not_be_read_is_not_written() -> None:
    with pytest.raises(RecordDamaged, match="speedup: expected a finite number"):
        encode(replace(record(), baseline=choice(speedup=float("nan"))))
    with pytest.raises(RecordDamaged, match="cannot be stored"):
        encode(replace(record(), batch=2**70))


def test_text_that_is_no_unicode_is_replaced() -> None:
    broken = replace(record(), key=replace(KEY, mode="\udc80"))
    assert decode(encode(broken)).key.mode == "?"


def test_is_fast() -> None:
    data = encode(record(trials=100))
    spent = []
    for _ in range(10):
        start = time.perf_counter()
        decode(data)
        spent.append(time.perf_counter() - start)
    assert min(spent) < 0.005, f"{min(spent) * 1e3:.2f} ms"
