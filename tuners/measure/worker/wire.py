"""Messages between the tuning process and its worker: msgpack maps over a pipe."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgpack

from advisor.cache.task import Task

CHANGED = "has changed since it was tuned"  # of a target that is not the one that a job knows
LIMIT = 64 * 2**20  # bytes of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """What a worker measures. `known`: fingerprints of the only model and hooks that are run."""

    task: Task
    device: str
    seed: int
    known: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What running one step shows of a workload."""

    name: str
    model: str  # fingerprint
    hooks: str  # fingerprint; '' without make_batch and loss
    code: str  # digest of the source of both; '' where that is no file of the user's
    libraries: tuple[str, ...]  # of its classes, as 'torchvision==0.26.0'
    family: str
    modules: int
    parameters: int
    convolves: bool
    repeats: bool  # whether blocks that it repeats are most of it
    threads: int
    device_uuid: str
    memory_bytes: int
    peak_bytes: int
    step_s: float
    wide: int = 0  # linear layers that fp8 may make faster


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What loading a batch shows of a workload's data."""

    name: str
    batch_bytes: int
    tensors: int  # in a batch, each of them a file; 0 where workers share by name
    shared_out: bool  # whether several workers share it out; else each would read all of it
    held_open: tuple[str, ...]  # files and connections, which forked workers would share
    batches: int = 0  # in an epoch; 0 where that is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """A loader worker's time for one part of a sample."""

    part: str
    seconds: float
    file: str = ""  # of its function; '' where that is not known
    made_bytes: int = 0  # of what it returns for a sample; 0 where that is not known
    place: int = 0  # in the order of calls, from 1 on; 0 where that is not known

    @property
    def where(self) -> str:
        return f"{self.file}:{self.part}" if self.file else self.part


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCosts:
    """A loader worker's time for a sample, the slowest part first; samples of an epoch, or 0."""

    parts: tuple[SampleCost, ...]
    samples: int

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.parts)


def send(pipe: Connection, message: dict[str, Any]) -> None:
    pipe.send_bytes(msgpack.packb(message))


def receive(pipe: Connection) -> dict[str, Any]:
    """The next message. Raises: EOFError, OSError: no other side; ValueError: no message."""
    message = msgpack.unpackb(pipe.recv_bytes(LIMIT))
    if not isinstance(message, dict):
        raise ValueError(f"expected a map, got {type(message).__name__}")
    return message
