from __future__ import annotations

import json
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.cache.codec import FORMAT, decode, encode, from_plain, make_envelope, to_plain
from advisor.cache.domain import LONGEST
from advisor.cache.record import OUTCOMES, Measurement, Record
from advisor.cache.signing import KeyRing
from advisor.errors import RecordDamaged
from tests.cache.examples import choice, planted, record, trial
from tests.cache.mutations import HEADERS
from tests.cache.test_key import configs_with

lines = st.text(st.just(" ") | st.characters(exclude_categories=("C", "Z")), max_size=20)
measurements = st.builds(
    Measurement,
    outcome=st.sampled_from(OUTCOMES),
    reason=lines,
    samples_per_s=st.floats(1e-9, 1e12),
    peak_bytes=st.integers(0, 2**50),
    blocks=st.lists(st.floats(0, 1e9), max_size=4).map(tuple),
)
EXAMPLE = encode(record())


@settings(max_examples=25)
@given(st.lists(st.tuples(measurements, configs_with(lines)), max_size=4), configs_with(lines))
def test_round_trip(measured: list[Any], input: Any) -> None:
    trials = [replace(trial(n, config), measurement=m) for n, (m, config) in enumerate(measured)]
    one = replace(record(), trials=tuple(trials), input=input)
    assert decode(encode(one)) == one
    assert from_plain(Record, json.loads(json.dumps(to_plain(one)))) == one


def wrap(content: object, **changes: object) -> bytes:
    envelope = msgpack.unpackb(make_envelope(msgpack.packb(content)))
    return msgpack.packb(envelope | changes)  # type: ignore[no-any-return]


TIME = "a time from 2020 until now"
TEXT = "one line of at most 4096 printable"


def leaves(content: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Yields the path and value of each leaf in plain data."""
    if not isinstance(content, dict | list):
        yield path.removeprefix("."), content
        return
    for name, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield from leaves(value, f"{path}.{name}")


def test_every_value_has_a_type_and_bounds() -> None:
    one_trial = record(trials=1)
    for path, value in leaves(to_plain(one_trial)):
        odd: list[Any] = ["\x1b[2J", "x" * (LONGEST + 1), {"a": 1}]
        if not isinstance(value, str):
            odd = ["\x1b[2J", float("inf"), float("nan"), {"a": 1}]
        for one in odd + [1e300] * (isinstance(value, float)):
            with pytest.raises(RecordDamaged) as caught:
                decode(wrap(planted(one_trial, path, one)))
            assert str(caught.value).isprintable(), path


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("baseline", None, "record.baseline: expected object, got null"),
        ("baseline.batch", True, "baseline.batch: expected int"),
        ("baseline.batch", 0, "record.baseline.batch: expected int >= 1"),
        ("baseline.peak_bytes", -1, "int >= 0"),
        ("baseline.peak_bytes", 2**63, "int <="),
        ("baseline.rounds", [9e9], "its turns give"),
        ("baseline.rounds", [], "no turn of its race"),
        ("baseline.samples_per_s", -1.0, "float >="),
        ("baseline.speedup", 1.01, "speed-up is 1.01, but its turns give 1"),
        ("extra", msgpack.Timestamp(1), "not msgpack"),
        ("input", {"a": [1]}, "record.input: config value a"),
        ("input", {"\x1b[2J": True}, TEXT),
        ("key.model", "../" * 20, "matching regex"),
        ("key.task.deterministic", 1, "expected bool"),
        ("key.task.shapes", [], "expected a batch and a sample"),
        ("key.task.shapes", [[-3, 3]], "each number from 1"),
        ("key.task.shapes", [[64, 0]], "shapes"),
        ("key.task.shapes", [[64] * 1000], "shapes"),
        ("provenance.created", 1.0, TIME),
        ("provenance.created", 1e305, TIME),
        ("provenance.study", "../../ran", "matching regex"),
        ("revised", 1.0, f"revised 1: expected {TIME}"),
        ("revised", 7.2e10, TIME),
        ("target", {}, "target: object missing required field name"),
        ("target.name", "a.py\nrun: rm -rf", TEXT),
        ("target.name", "a\u202eyp.b", TEXT),
        ("target.name", "x" * (2**16 + 1), "not msgpack"),
        ("target.origin", "/etc/passwd", "matching regex"),
        ("trials.0.measurement.samples_per_s", 0.0, "has no speed"),
        ("trials.1.measurement.outcome", "splendid", "trials[1].measurement.outcome: expected str"),
        ("winners.0.choice.speedup", 0, "float >= 1e-06"),
        ("winners.2.choice.high", 4000.0, "fastest turn is 4000, but its turns give 3030"),
        ("winners.2.choice.low", 2900.0, "slowest turn is 2900, but its turns give 2970"),
        ("winners.2.choice.samples_per_s", 3100.0, "samples/s is 3100, but its turns give 3000"),
        ("winners.2.choice.speedup_low", 1.6, "not in its own interval"),
        ("winners.2.free", True, "winners: expected one for each of flags"),
        ("winners.2.use", "pilot", "winners: expected one for each of flags"),
    ],
)
def test_values_out_of_bounds_are_refused(path: str, value: object, says: str) -> None:
    with pytest.raises(RecordDamaged, match=re.escape(says)):
        decode(wrap(planted(record(), path, value)))


def test_envelope_errors_name_the_problem() -> None:
    for name, value, says in (
        ("format", FORMAT + 1, f"newer than {FORMAT}.*upgrade advisor"),
        ("format", FORMAT - 1, f"format {FORMAT - 1} is older than"),
        ("format", "1", "format: missing"),
        ("record", [1], "envelope.record: expected"),
        ("record", b"\x80", "do not match their checksum"),
        ("sha256", b"", "do not match their checksum"),
        ("sha256", None, "envelope.sha256: expected"),
    ):
        with pytest.raises(RecordDamaged, match=says):
            decode(wrap(to_plain(record()), **{name: value}))


def test_unknown_fields_and_missing_defaults_are_accepted() -> None:
    content = to_plain(record())
    content["unknown"] = [1]
    content["baseline"]["speedup"] = 1  # int for a float field
    del content["trials"][0]["measurement"]["gpu_s"]  # a field with a default
    assert decode(wrap(content, later=1)) == record()


def test_a_record_with_too_many_trials_drops_the_slower_ones() -> None:
    many = record(trials=3000)
    slow, fast = many.trials[0], many.trials[2999]
    fast = replace(fast, measurement=replace(fast.measurement, samples_per_s=9e9))
    slow = replace(slow, measurement=replace(slow.measurement, samples_per_s=1.0))
    found = decode(encode(replace(many, trials=(slow, *many.trials[1:2999], fast))))
    assert 0 < len(found.trials) < 3000
    assert found.trials[-1] == replace(fast, measurement=replace(fast.measurement, blocks=()))
    assert slow.number not in [trial.number for trial in found.trials]


def test_signatures_are_checked() -> None:
    team = KeyRing(b"a secret of a team", required=True)
    other = KeyRing(b"the secret of another", required=True)
    signed = encode(record(), team)
    assert decode(signed, team) == decode(signed) == record()
    hmac = msgpack.unpackb(signed)["hmac"]
    forged = wrap(to_plain(replace(record(), stale="no longer")), hmac=hmac)
    for data, keyring, says in (
        (EXAMPLE, team, "not signed"),
        (signed, other, "signed with another secret"),
        (forged, team, "changed since"),
    ):
        with pytest.raises(RecordDamaged, match=says):
            decode(data, keyring)


def test_msgpack_bombs_take_no_memory() -> None:
    tracemalloc.start()
    for data in (
        b"\xdd\x00\x00\x07\xff" * 1000,  # nested lists with long declared lengths
        *HEADERS,
        b"\x91" * 100_000,
        b"\x9f" + b"\x90" * 1_000_000,
        msgpack.packb([[[]] * 2000] * 300),
    ):
        with pytest.raises(RecordDamaged):
            decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20


def test_unreadable_values_are_not_written() -> None:
    with pytest.raises(RecordDamaged, match="speedup: expected float >= 1e-06"):
        encode(replace(record(), baseline=choice(speedup=float("nan"))))
    with pytest.raises(RecordDamaged, match="cannot be stored"):
        encode(replace(record(), trials=(replace(record().trials[0], number=2**70),)))
    # Characters that a terminal would interpret are replaced.
    named = replace(record().target, name="a\udc80\x1b[31mb\nc\u202ed.py")
    assert decode(encode(replace(record(), target=named))).target.name == "a??[31mb c?d.py"
    long = replace(record().target, name="x" * (LONGEST + 1))
    assert decode(encode(replace(record(), target=long))).target.name == "x" * LONGEST


THREADS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from advisor.cache.codec import from_plain

sys.setswitchinterval(1e-6)
for number in range(100):
    inner = make_dataclass("Inner", [("a", int), ("b", tuple[int, ...], ())])
    outer = make_dataclass("Outer", [("x", inner), ("y", tuple[inner, ...], ())])
    start = threading.Barrier(8)

    def read(_number):
        start.wait()
        from_plain(outer, {"x": {"a": 1}, "y": [{"a": 2}]})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
"""


def test_concurrent_first_reads_of_a_class_are_safe() -> None:
    """Runs in a subprocess: msgspec can crash if two threads inspect a class at once."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
