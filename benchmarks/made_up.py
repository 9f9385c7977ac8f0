"""Makes any number of synthetic records that are as large as real ones.

A few template records are encoded and checked like those of workers, then copied with the
fingerprints of models that do not exist.
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

RECORDS_PER_MODEL = 4
"""Two devices times two input sizes."""
POPULAR = "train.py:Net"
"""The target name of every tenth model."""
TRIALS = (12, 40, 40, 120)
"""Numbers of trials in the records of one model, which are then 5 to 50 KB large."""
READER = Records((), NO_KEYS, refusal)


@dataclass(frozen=True, slots=True)
class Template:
    """A record to copy, and its database row."""

    record: Record
    payload: bytes
    row: dict[str, Any]

    @classmethod
    def of(cls, key: Key, trials: int) -> Template:
        one = example(key=key, name=target_name(0), trials=trials)
        one = replace(one, target=replace(one.target, code=code_of(0)), family="f0" * 8)
        rng = random.Random(trials)
        noisy = tuple(
            replace(
                trial,
                measurement=replace(
                    trial.measurement, blocks=tuple(rng.random() for _ in range(8))
                ),
            )
            for trial in one.trials
        )
        one = replace(one, trials=noisy)  # like real measurements: all different
        data = encode(one)
        item = records.item_of(READER, Name.of(one, data).text, data)
        row = {column.name: getattr(item, column.name) for column in Item.__table__.columns}
        return cls(one, open_envelope(data)[0], row)

    def copy_for(self, model: int) -> dict[str, Any]:
        """Returns the database row of a copy for another model."""
        renamed, fingerprint, code = target_name(model), fingerprint_of(model), code_of(model)
        payload = self.payload.replace(self.record.key.model.encode(), fingerprint.encode())
        payload = payload.replace(target_name(0).encode(), renamed.encode())
        payload = payload.replace(code_of(0).encode(), code.encode())
        data = make_envelope(payload)
        target = replace(self.record.target, name=renamed, code=code)
        copy = replace(self.record, key=replace(self.record.key, model=fingerprint), target=target)
        name = Name.of(copy, data)
        return self.row | {
            "key": name.text,
            "record_key": name.record_key,
            "model": fingerprint[:12],
            "id": name.id,
            "target": name.target[0],
            "called": renamed,
            "file": renamed.partition(":")[0],
            "code": code,
            "fields": self.row["fields"].replace(self.record.key.model, fingerprint),
            "data": data,
            "size": len(data),
            "stored": time.time(),
            "token": 1,
        }


def target_name(model: int) -> str:
    """Returns the target name of a model. All names have the same length."""
    return POPULAR if model % 10 == 1 else f"m{model:07d}:Net"


def fingerprint_of(model: int) -> str:
    return random.Random(model).randbytes(32).hex()


def code_of(model: int) -> str:
    return random.Random(~model).randbytes(8).hex()


def make_templates() -> list[Template]:
    """Returns one template for each device and input size."""
    slots = itertools.product(("NVIDIA H200", "NVIDIA H100"), (224, 256))
    keys = [
        replace(
            changed(KEY, "shapes", (3, size, size)),
            environment=replace(KEY.environment, device=replace(DEVICE, name=name)),
        )
        for name, size in slots
    ]
    return [Template.of(key, trials) for key, trials in zip(keys, TRIALS, strict=True)]
