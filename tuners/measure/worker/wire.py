"""Messages between the tuning process and its worker: msgpack maps over a pipe."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgpack

from advisor.cache.task import Task

CHANGED = "has changed since it was tuned"
"""Part of a worker's error where the target is not the one that the job knows."""
LIMIT = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker measures, and where; the same for all configs."""

    task: Task
    device: str
    seed: int
    known: tuple[str, ...] = ()
    """Fingerprints of the model and the hooks that the target must have; no other is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What running one step shows of a workload.

    Attributes:
        model: its fingerprint.
        hooks: fingerprint of the target's make_batch and loss; '' where it has none.
        code: digest of the source of all these; '' where that is no file of the user's.
        libraries: where its classes come from, as 'torchvision==0.26.0'.
        family: of the kinds of modules in it.
        repeats: whether blocks that it repeats are most of it.
        draws: whether a step draws random numbers.
        wide: linear layers that fp8 may make faster.
    """

    name: str
    model: str
    hooks: str
    code: str
    libraries: tuple[str, ...]
    family: str
    modules: int
    parameters: int
    convolves: bool
    repeats: bool
    draws: bool
    threads: int
    device_uuid: str
    memory_bytes: int
    peak_bytes: int
    step_s: float
    wide: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What loading a batch shows of a workload's data.

    Attributes:
        tensors: in a batch, each of them a file; 0 where workers share by name.
        shared_out: whether several workers share it out; else each would read all of it.
        held_open: files and connections of the dataset, which forked workers would share.
        batches: in an epoch; 0 where that is not known.
    """

    name: str
    batch_bytes: int
    tensors: int
    shared_out: bool
    held_open: tuple[str, ...]
    batches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A loader worker's time for one part of a sample.

    Attributes:
        file: where its function is; '' where that is not known.
        made_bytes: what it returns for a sample; 0 where that is not known.
        place: from 1 on, its place among the parts that return something, as they are called; 0
            where that is not known.
    """

    part: str
    seconds: float
    file: str = ""
    made_bytes: int = 0
    place: int = 0

    @property
    def where(self) -> str:
        """'data.py:Images.decode'."""
        return f"{self.file}:{self.part}" if self.file else self.part


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A loader worker's time for a sample, the slowest part first.

    Attributes:
        samples: in an epoch; 0 where that is not known.
    """

    parts: tuple[Cost, ...]
    samples: int

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
