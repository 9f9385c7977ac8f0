"""Made-up records, as many as are wanted, and as large as real ones.

A few are encoded and checked as those of workers are, and copied with the fingerprints of models
that nobody has.
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, replace
from typing import Any

from advisor.cache.codec import encode, make_envelope, open_envelope
from advisor.cache.key import Key
from advisor.cache.name import Name
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.signing import NO_KEYS
from advisor.open_store import refusal
from advisor.service import records
from advisor.service.schema import Item
from tests.cache.examples import DEVICE, KEY, changed
from tests.cache.examples import record as example

A_MODEL = 4
"""Records of one model: two devices, two sizes of its input."""
POPULAR = "train.py:Net"
"""What every tenth model is called."""
TRIALS = (12, 40, 40, 120)
"""Of the records of one model: 5 to 50 KB."""
READER = Records((), NO_KEYS, refusal)


@dataclass(frozen=True, slots=True)
class Copied:
    """A record that copies are made of, and its row in the database."""

    record: Record
    payload: bytes
    row: dict[str, Any]

    @classmethod
    def of(cls, key: Key, trials: int) -> Copied:
        one = example(key=key, name=called(0), trials=trials)
        one = replace(one, target=replace(one.target, code=code_of(0)), family="f0" * 8)
        rng = random.Random(trials)
        noisy = tuple(
            replace(
                tried,
                measurement=replace(
                    tried.measurement, blocks=tuple(rng.random() for _ in range(8))
                ),
            )
            for tried in one.trials
        )
        one = replace(one, trials=noisy)  # as what was measured: no number is like another
        data = encode(one)
        item = records.item_of(READER, Name.of(one, data).text, data)
        row = {column.name: getattr(item, column.name) for column in Item.__table__.columns}
        return cls(one, open_envelope(data)[0], row)

    def at(self, model: int) -> dict[str, Any]:
        """The row of a copy, which is of another model."""
        of_model, hex, code = called(model), fingerprint_of(model), code_of(model)
        payload = self.payload.replace(self.record.key.model.encode(), hex.encode())
        payload = payload.replace(called(0).encode(), of_model.encode())
        payload = payload.replace(code_of(0).encode(), code.encode())
        data = make_envelope(payload)
        target = replace(self.record.target, name=of_model, code=code)
        copy = replace(self.record, key=replace(self.record.key, model=hex), target=target)
        name = Name.of(copy, data)
        return self.row | {
            "key": name.text,
            "record_key": name.record_key,
            "model": hex[:12],
            "id": name.id,
            "target": name.target[0],
            "called": of_model,
            "file": of_model.partition(":")[0],
            "code": code,
            "fields": self.row["fields"].replace(self.record.key.model, hex),
            "data": data,
            "size": len(data),
            "stored": time.time(),
            "token": 1,
        }


def called(model: int) -> str:
    """As many letters for each."""
    return POPULAR if model % 10 == 1 else f"m{model:07d}:Net"


def fingerprint_of(model: int) -> str:
    return random.Random(model).randbytes(32).hex()


def code_of(model: int) -> str:
    return random.Random(~model).randbytes(8).hex()


def of_a_model() -> list[Copied]:
    """What copies are made of: two devices, two sizes of input."""
    slots = itertools.product(("NVIDIA H200", "NVIDIA H100"), (224, 256))
    keys = [
        replace(
            changed(KEY, "shapes", (3, size, size)),
            environment=replace(KEY.environment, device=replace(DEVICE, name=name)),
        )
        for name, size in slots
    ]
    return [Copied.of(key, trials) for key, trials in zip(keys, TRIALS, strict=True)]
