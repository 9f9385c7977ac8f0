"""Messages between the tuning process and its worker: msgpack maps over a pipe."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.cache.task import Task

CHANGED = "has changed since it was tuned"  # of a target with another fingerprint than the job's


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """The job of a worker. `known`: fingerprints that model and hooks must have; empty: any."""

    task: Task
    device: str
    seed: int
    known: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts on a workload, from running its first steps."""

    name: str
    model: str  # fingerprint
    hooks: str  # fingerprint; '' without make_batch and loss
    code: str  # digest of the target's source; '' if that is no file of the user's
    libraries: tuple[str, ...]  # of its classes, as 'torchvision==0.26.0'
    family: str
    modules: int
    parameters: int
    convolves: bool
    repeats: bool  # whether repeated blocks are most of the model
    threads: int
    device_uuid: str
    memory_bytes: int
    peak_bytes: int
    step_s: float
    wide: int = 0  # linear layers that fp8 may make faster


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Facts on a workload's data, from loading batches."""

    name: str
    batch_bytes: int
    tensors: int  # in a batch, each an open file; 0 if workers share memory by name
    shared_out: bool  # whether workers divide the data; else each would read all of it
    held_open: tuple[str, ...]  # files and connections, which forked workers would share
    batches: int = 0  # in an epoch; 0 if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """A loader worker's time for one part of a sample."""

    part: str
    seconds: float
    file: str = ""  # of the part's function; '' if unknown

    @property
    def where(self) -> str:
        return f"{self.file}:{self.part}" if self.file else self.part


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCosts:
    """A loader worker's time for a sample, the slowest part first."""

    parts: tuple[SampleCost, ...]

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.parts)
