"""Whatever bytes a store holds: they are a record, or refused; nothing runs, nothing is taken."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cache.codec import decode, encode
from advisor.cache.record import Choice
from advisor.cache.records import Records
from advisor.cache.stores import open_store, pack
from advisor.errors import RecordDamaged, StoreDamaged
from advisor.tuners.knobs import refusal
from tests.cache.examples import DEFAULT, choice, record
from tests.cache.mutations import corpus, mutated

ROOT = Path(__file__).parents[2]


@given(st.integers(0, 2**32))
def test_mutations_are_records_or_refused(seed: int) -> None:
    for data in itertools.islice(mutated(corpus(), random.Random(seed)), 20):
        try:
            record = decode(data)
        except RecordDamaged as exc:
            assert "\n" not in str(exc) and len(str(exc)) < 300
        else:
            refusal(record)
            assert decode(encode(record)) == record


def test_many_take_no_memory_and_run_nothing() -> None:
    """In a process of its own, whose peak memory and system calls are its own too."""
    done = subprocess.run(
        [sys.executable, "benchmarks/fuzz.py", "--count", "5000", "--results", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@given(st.integers(0, 2**32))
def test_a_mutated_pack_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    dice = random.Random(seed)
    path = tmp_path_factory.mktemp("pack") / "records.pack"
    seeds = corpus()[:3]
    pack.write(path, ((f"record/{n}", data) for n, data in enumerate(seeds)))
    data = bytearray(path.read_bytes())
    for _ in range(dice.randrange(1, 5)):
        data[dice.randrange(len(data))] = dice.randrange(256)
    path.write_bytes(bytes(data[: dice.randrange(len(data))] if dice.random() < 0.3 else data))
    try:
        found = list(pack.PackStore(path).members())
    except StoreDamaged as exc:
        assert "\n" not in str(exc)
    else:
        for _name, got in found:
            assert isinstance(got, RecordDamaged) or got in seeds


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        (choice(DEFAULT.replace(batch_size=1)), "batch 64, and its choices are of another"),
        (choice(DEFAULT.replace(compile="../../x")), r"compile '\.\./\.\./x': expected none"),
    ],
)
def test_planted_values_are_refused_with_their_reason(
    tmp_path: Path, planted: Choice, says: str
) -> None:
    store = open_store(f"dir:{tmp_path}")
    Records(store).put(replace(record(), baseline=planted))
    records = Records(store, check=refusal)
    assert records.all() == []
    (line,) = records.damaged
    assert re.search(says, line), line
