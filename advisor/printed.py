"""What a record says of itself: the lines to type, what was chosen, what has changed since."""

from __future__ import annotations

import dataclasses
import shlex

from advisor.cache.match import Difference, compare
from advisor.cache.record import Choice, Record
from advisor.cache.stores import open_stores
from advisor.opening import Cache


def script_line(record: Record, cache: Cache = None) -> str:
    """The line that applies a record in a script; `cache`: where it is, as `lookup` takes it."""
    from advisor.tuners.knobs import PERMITTED

    key = record.key
    given = [f'"{record.target.name}"']
    shapes = [f"({', '.join(shape.split('x'))})" for shape in shapes_of(record)]
    given.append(f"shape={shapes[0] if len(shapes) == 1 else '[' + ', '.join(shapes) + ']'}")
    if len(record.target.arguments):
        pairs = (f'"{name}": {value!r}' for name, value in record.target.arguments.items())
        given.append(f"model_args={{{', '.join(pairs)}}}")
    if key.sample.dtype != "float32":
        given.append(f'dtype="{key.sample.dtype}"')
    if key.mode != "train":
        given.append(f'mode="{key.mode}"')
    elif key.optimizer != "sgd":
        given.append(f'optimizer="{key.optimizer}"')
    if _beside_cuda(record):
        given.append('device="cpu"')
    if key.permits.deterministic:
        given.append("deterministic=True")
    if set(key.permits.precisions) != set(PERMITTED):
        given.append(f"precisions={list(key.permits.precisions)}".replace("'", '"'))
    if cache is not None and _urls(cache) != _urls(None):
        urls = _urls(cache)
        shown = f'"{urls[0]}"' if len(urls) == 1 else str(list(urls)).replace("'", '"')
        given.append(f"cache={shown}")
    return f"advice = advisor.apply({', '.join(given)})"


def _urls(cache: Cache) -> tuple[str, ...]:
    """Of the stores, without passwords."""
    return tuple(store.url for store in open_stores(cache))


def shapes_of(record: Record) -> tuple[str, ...]:
    """The shapes of a record's batches, as '64x3x224x224'."""
    return record.key.mix or ("x".join(map(str, (record.batch, *record.key.sample.shape))),)


def tune_line(record: Record) -> str:
    """The command that measures a record again."""
    from advisor.tuners.knobs import PERMITTED

    key = record.key
    options = [f"--shape {shape}" for shape in shapes_of(record)]
    for name, value in record.target.arguments.items():
        options.append(f"--model-arg {shlex.quote(f'{name}={value}')}")
    if key.sample.dtype != "float32":
        options.append(f"--dtype {key.sample.dtype}")
    if key.mode != "train":
        options.append(f"--mode {key.mode}")
    elif key.optimizer != "sgd":
        options.append(f"--optimizer {key.optimizer}")
    if _beside_cuda(record):
        options.append("--device cpu")
    if key.permits.deterministic:
        options.append("--deterministic")
    if set(key.permits.precisions) != set(PERMITTED):
        options.append(f"--precisions {','.join(key.permits.precisions)}")
    made = record.provenance
    if made.effort != "normal":
        options.append(f"--effort {made.effort}")
    if made.steps:
        options.append(f"--steps {made.steps}")
    elif made.duration_s:
        options.append(f"--duration {made.duration_s:g}s")
    return f"advisor tune {record.target.name} {' '.join(options)}"


def _beside_cuda(record: Record) -> bool:
    """Whether a record is of the CPU of a machine that would take its CUDA device by default."""
    from advisor.tuners.environment import default_device

    return record.key.environment.device.kind == "cpu" and default_device() != "cpu"


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
