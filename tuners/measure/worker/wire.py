"""Messages between the tuning process and its worker: msgpack maps over a pipe."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgpack

from advisor.cache.task import Task

CHANGED = "has changed since it was tuned"
"""What a worker says of a target that is not the one that is known."""
LIMIT = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker is to measure, and where; the same for all configs."""

    task: Task
    device: str
    seed: int
    known: tuple[str, ...] = ()
    """Fingerprints of model and hooks that the target must have: of another no step is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the worker found out about the workload by running one step of it."""

    name: str
    model: str
    """Fingerprint."""
    hooks: str
    """Fingerprint of the target's make_batch and loss; '' where it has none."""
    code: str
    """Digest of the source of all these; '' where that is no file of the user's."""
    libraries: tuple[str, ...]
    """That its classes come from, as 'torchvision==0.26.0'."""
    family: str
    """Of the kinds of modules in it."""
    modules: int
    parameters: int
    convolves: bool
    repeats: bool
    """Whether blocks that it repeats are most of it."""
    draws: bool
    """Whether a step draws random numbers."""
    threads: int
    device_uuid: str
    memory_bytes: int
    peak_bytes: int
    step_s: float
    wide: int = 0
    """Linear layers that fp8 may make faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What the worker found out about a workload's data by loading a batch of it."""

    name: str
    samples: int
    """Of an epoch; 0 where that is not known."""
    batch_bytes: int
    tensors: int
    """In a batch, each of them a file; 0 where workers share by name."""
    shared_out: bool
    """Whether several workers share it out; else each would read all."""
    held_open: tuple[str, ...]
    """Files and connections that the dataset holds, which workers would share."""
    batches: int = 0
    """Of an epoch; 0 where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a part of a sample takes of a loader's worker."""

    part: str
    seconds: float
    file: str = ""
    """That its function is in; '' where that is not known."""
    made_bytes: int = 0
    """That it returns for a sample; 0 where that is not known."""
    place: int = 0
    """Among the parts that return something for a sample, from 1 on, as they are called; 0 where
    that is not known."""

    @property
    def where(self) -> str:
        """'data.py:Images.decode'."""
        return f"{self.file}:{self.part}" if self.file else self.part


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a sample costs a loader's worker, the dearest part first."""

    parts: tuple[Cost, ...]
    samples: int
    """Of an epoch; 0 where that is not known."""

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return sum(one.seconds for one in self.parts)


def send(pipe: Connection, message: dict[str, Any]) -> None:
    pipe.send_bytes(msgpack.packb(message))


def receive(pipe: Connection) -> dict[str, Any]:
    """The next message.

    Raises:
        EOFError, OSError: the other side is gone.
        ValueError: what came is no message.
    """
    message = msgpack.unpackb(pipe.recv_bytes(LIMIT))
    if not isinstance(message, dict):
        raise ValueError(f"expected a map, got {type(message).__name__}")
    return message
