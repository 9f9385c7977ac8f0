"""Messages between the tuning process and its worker: msgpack maps over a pipe."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgpack

LIMIT = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker is to measure; the same for all its trials."""

    target: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]
    dtype: str
    vocab: int
    batch: int
    mode: str
    optimizer: str
    deterministic: bool
    device: str
    max_memory: int
    """Bytes, 0 for all there is."""
    seed: int
    mix: tuple[tuple[int, ...], ...] = ()
    """Shapes of batches that the inputs alternate between; empty for `batch`x`shape` alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the worker found out about the workload by running one step of it."""

    name: str
    model: str
    """Fingerprint."""
    family: str
    """Of the kinds of modules in it."""
    modules: int
    parameters: int
    convolves: bool
    threads: int
    device_uuid: str
    memory_bytes: int
    peak_bytes: int
    step_s: float


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
