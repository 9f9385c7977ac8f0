from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cache.codec import FORMAT, decode, encode, from_plain, make_envelope, to_plain
from advisor.cache.config import Config
from advisor.cache.record import OUTCOMES, STAGES, Choice, Measurement, Record, Trial
from advisor.cache.seal import KeyRing
from advisor.errors import RecordDamaged
from tests.cache.examples import choice, record
from tests.cache.test_config import configs

amounts = st.floats(0, 1e9)
rates = st.floats(1e-9, 1e12)
turns = st.lists(st.floats(1, 1000), min_size=1, max_size=4).map(tuple)
counts = st.integers(0, 10**12)
lines = st.text(max_size=20).filter(str.isprintable)
settings = configs.filter(
    lambda one: all(part.isprintable() for part in (*one, *one.values()) if isinstance(part, str))
)
measurements = st.builds(
    Measurement,
    outcome=st.sampled_from(OUTCOMES),
    reason=lines,
    samples_per_s=rates,
    low=rates,
    high=rates,
    peak_bytes=counts,
    steps=counts,
    blocks=st.lists(amounts, max_size=4).map(tuple),
)
trials = st.builds(
    Trial,
    number=counts,
    config=settings,
    measurement=measurements,
    stage=st.sampled_from(STAGES),
    origin=lines,
    seconds=amounts,
)


def of_turns(config: Config, turns: tuple[float, ...], peak_bytes: int) -> Choice:
    """Of a baseline: the others are held against its turns."""
    middle = statistics.median(turns)
    one = choice(config, middle, 1.0)
    one = replace(one, batch=64, low=min(turns), high=max(turns), rounds=turns)
    return replace(one, peak_bytes=peak_bytes)


choices = st.builds(of_turns, settings, turns, counts)
records = st.builds(
    lambda trials, baseline, input: replace(
        record(),
        trials=tuple(trials),
        baseline=baseline,
        winners=tuple(replace(one, choice=baseline) for one in record().winners),
        input=input,
    ),
    st.lists(trials, max_size=4),
    choices,
    settings,
)
EXAMPLE = encode(record())


@given(records)
def test_round_trip(one: Record) -> None:
    assert decode(encode(one)) == one
    assert from_plain(Record, json.loads(json.dumps(to_plain(one)))) == one


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


def enclosed(content: object, **changes: object) -> bytes:
    envelope = msgpack.unpackb(make_envelope(msgpack.packb(content)))
    return msgpack.packb(envelope | changes)  # type: ignore[no-any-return]


def put(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *owners, name = path.split(".")
        here: Any = content
        for owner in owners:
            here = here[int(owner) if isinstance(here, list) else owner]
        here[name] = value

    return change


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.pop(name)


MEASUREMENT = "trials.1.measurement"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop("target"), "record: Object missing required field `target`"),
        (put("baseline.batch", True), r"baseline\.batch: expected an integer"),
        (
            put("baseline.batch", 0),
            r"record\.baseline\.batch: expected an integer >= 1",
        ),
        (put("key.task.shapes", [[3, "x"]]), r"key\.task\.shapes\[0\]\[1\]: expected an integer"),
        (put("key.task.shapes", [[-3, 3]]), "each number from 1"),
        (put("key.task.deterministic", 1), "expected true or false"),
        (
            put(f"{MEASUREMENT}.outcome", "splendid"),
            r"trials\[1\]\.measurement\.outcome: expected .*ok",
        ),
        (
            put(f"{MEASUREMENT}.low", float("inf")),
            r"measurement\.low: expected a number <= 1",
        ),
        (put(f"{MEASUREMENT}.low", "fast"), "expected a number, got text"),
        (put("input", {"a": [1]}), r"record\.input: config value a"),
        (put("baseline", None), r"record\.baseline: expected a map"),
        (put("target.name", "x" * (2**16 + 1)), "not msgpack"),
        (put("extra", msgpack.Timestamp(1)), "not msgpack"),
    ],
)
def test_names_what_is_wrong(change: Callable[[dict[str, Any]], None], says: str) -> None:
    content = to_plain(record())
    change(content)
    with pytest.raises(RecordDamaged, match=says):
        decode(enclosed(content))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": FORMAT + 1}, f"newer than {FORMAT}.*upgrade advisor"),
        ({"format": FORMAT - 1}, f"format {FORMAT - 1} is no longer read"),
        ({"format": "1"}, "format: missing"),
        ({"record": [1]}, "envelope.record: expected"),
        ({"record": b"\x80"}, "do not match their checksum"),
        ({"sha256": b""}, "do not match their checksum"),
        ({"sha256": None}, "envelope.sha256: expected"),
    ],
)
def test_names_what_is_wrong_with_the_envelope(changes: dict[str, object], says: str) -> None:
    with pytest.raises(RecordDamaged, match=says):
        decode(enclosed(to_plain(record()), **changes))


def test_tolerates() -> None:
    content = to_plain(record())
    content["unknown"] = [1]
    content["baseline"]["speedup"] = 1  # an integer where a number is asked
    del content["trials"][0]["measurement"]["gpu_s"]  # has a default
    assert decode(enclosed(content, later=1)) == record()


def test_what_a_newer_version_wrote_survives() -> None:
    content = to_plain(record())
    content["later"] = {"deep": [1, 2]}
    content["provenance"]["cluster"] = "eu"
    content["baseline"]["watts"] = 500
    content["trials"][1]["measurement"]["joules"] = 3.5
    newer = enclosed(content)
    old = decode(newer)
    revised = replace(old, stale="slower now", revised=1.74e9, trials=(*old.trials, old.trials[0]))
    again = msgpack.unpackb(msgpack.unpackb(encode(revised, revises=newer))["record"])
    assert again["later"] == {"deep": [1, 2]}
    assert again["provenance"]["cluster"] == "eu"
    assert again["baseline"]["watts"] == 500
    assert again["trials"][1]["measurement"]["joules"] == 3.5
    assert "joules" not in again["trials"][0]["measurement"]
    assert again["stale"] == "slower now"
    assert len(again["trials"]) == len(old.trials) + 1


def test_what_is_too_large_is_thinned_out() -> None:
    many = record(trials=3000)
    slow, fast = many.trials[0], many.trials[2999]
    fast = replace(fast, measurement=replace(fast.measurement, samples_per_s=9e9))
    slow = replace(slow, measurement=replace(slow.measurement, samples_per_s=1.0))
    found = decode(encode(replace(many, trials=(slow, *many.trials[1:2999], fast))))
    assert 0 < len(found.trials) < 3000
    assert found.trials[-1] == replace(fast, measurement=replace(fast.measurement, blocks=()))
    assert slow.number not in [trial.number for trial in found.trials]


KEYRING = KeyRing(b"a secret of a team", required=True)


def test_signed() -> None:
    signed = encode(record(), KEYRING)
    assert decode(signed, KEYRING) == record()
    assert decode(signed) == record()
    other = KeyRing(b"the secret of another", required=True)
    for data, keyring, says in (
        (EXAMPLE, KEYRING, "not signed"),
        (signed, other, "signed with another secret"),
    ):
        with pytest.raises(RecordDamaged, match=says):
            decode(data, keyring)
    envelope = msgpack.unpackb(signed)
    forged = enclosed(to_plain(replace(record(), stale="no longer")), hmac=envelope["hmac"])
    with pytest.raises(RecordDamaged, match="changed since"):
        decode(forged, KEYRING)


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\x00\x00\x07\xff" * 1000,  # lists in lists, each said to be long
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x9f" + b"\x90" * 1_000_000,
        msgpack.packb([[[]] * 2000] * 300),
    ],
)
def test_greedy_bytes_take_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RecordDamaged):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_what_could_not_be_read_is_not_written() -> None:
    with pytest.raises(RecordDamaged, match="speedup: expected a number >= 1e-06"):
        encode(replace(record(), baseline=choice(speedup=float("nan"))))
    with pytest.raises(RecordDamaged, match="cannot be stored"):
        encode(replace(record(), trials=(replace(record().trials[0], number=2**70),)))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("winners.2.choice.speedup", 1.51, "speed-up 1.51, and its turns say 1.5"),
        ("winners.2.choice.samples_per_s", 3100.0, "samples/s 3100, and its turns say 3000"),
        ("winners.2.choice.low", 2900.0, "slowest turn 2900, and its turns say 2970"),
        ("winners.2.choice.high", 4000.0, "fastest turn 4000, and its turns say 3030"),
        ("winners.2.choice.speedup_low", 1.6, "not in its own interval"),
        ("winners.2.choice.rounds", [], "without a turn"),
        ("baseline.speedup", 1.01, "speed-up 1.01, and its turns say 1"),
        ("baseline.rounds", [], "without a turn"),
        ("trials.0.measurement.samples_per_s", 0.0, "without a speed"),
        ("revised", 1.0, "revised 1: expected a time from 2020 until now"),
    ],
)
def test_what_contradicts_itself_is_refused(path: str, value: object, says: str) -> None:
    content = to_plain(record())
    put(path, value)(content)
    with pytest.raises(RecordDamaged, match=says):
        decode(enclosed(content))


def test_a_winner_revised_is_held_against_the_turns_of_the_default_too() -> None:
    faster = choice(record().winner("loop").config, 3300.0, 1.5)
    winners = tuple(
        replace(one, choice=faster) if one.use == "loop" else one for one in record().winners
    )
    for revised in (0.0, 1.71e9):
        with pytest.raises(RecordDamaged, match=r"speed-up 1.5, and its turns say 1.65"):
            encode(replace(record(), winners=winners, revised=revised))


def test_text_that_no_terminal_shows_as_it_is_is_replaced() -> None:
    named = replace(record().target, name="a\udc80\x1b[31mb\nc\u202ed.py")
    broken = replace(record(), target=named)
    assert decode(encode(broken)).target.name == "a??[31mb c?d.py"


THREADS = """
import sys, threading
from dataclasses import make_dataclass
from advisor.cache.codec import from_plain

sys.setswitchinterval(1e-6)
for number in range(100):
    inner = make_dataclass("Inner", [("a", int), ("b", tuple[int, ...], ())])
    outer = make_dataclass("Outer", [("x", inner), ("y", tuple[inner, ...], ())])
    start = threading.Barrier(8)

    def read():
        start.wait()
        from_plain(outer, {"x": {"a": 1}, "y": [{"a": 2}]})

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_several_threads_may_be_the_first_to_read_a_class() -> None:
    """In a process of its own: msgspec crashes if two of them describe it at once."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
