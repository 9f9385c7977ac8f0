"""What a record says of itself: the lines to type, what was chosen, what has changed since."""

from __future__ import annotations

import dataclasses

from advisor.cache.match import Difference, compare
from advisor.cache.record import Choice, Record


def script_line(record: Record) -> str:
    """The line that applies a record in a script."""
    key = record.key
    shape = ", ".join(map(str, (record.batch, *key.sample.shape)))
    extra = "" if key.mode == "train" else f', mode="{key.mode}"'
    if key.permits.deterministic:
        extra += ", deterministic=True"
    return f'advice = advisor.apply("{record.target.name}", shape=({shape}){extra})'


def tune_line(record: Record) -> str:
    """The command that measures a record again."""
    from advisor.tuners.knobs import PERMITTED

    key = record.key
    options = [f"--shape {'x'.join(map(str, (record.batch, *key.sample.shape)))}"]
    options += [f"--model-arg {name}={value}" for name, value in record.target.arguments.items()]
    if key.sample.dtype != "float32":
        options.append(f"--dtype {key.sample.dtype}")
    if key.mode != "train":
        options.append(f"--mode {key.mode}")
    elif key.optimizer != "sgd":
        options.append(f"--optimizer {key.optimizer}")
    if key.permits.deterministic:
        options.append("--deterministic")
    if set(key.permits.precisions) != set(PERMITTED):
        options.append(f"--precisions {','.join(key.permits.precisions)}")
    return f"advisor tune {record.target.name} {' '.join(options)}"


def staleness(record: Record) -> tuple[Difference, ...]:
    """What has changed on this machine since a record of its device was measured."""
    from advisor.tuners.environment import default_device, detect

    device = record.key.environment.device
    here = detect("cpu" if device.kind == "cpu" else default_device())
    if here.device != device:
        return ()
    return compare(dataclasses.replace(record.key, environment=here), record.key)[1]


def choices(record: Record) -> list[tuple[str, Choice]]:
    """The chosen configs of a record with their names, for reports."""
    found = [("torch default", record.baseline)]
    if record.at_batch != record.baseline:
        found.append(("at your batch", record.at_batch))
    if record.free is not None and record.free != record.at_batch:
        found.append(("batch free", record.free))
    return found
