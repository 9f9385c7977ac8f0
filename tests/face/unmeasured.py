"""Tuning without measuring: the worker builds the model; the record or its speed is made up."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from advisor import tuning, verification
from advisor.cache.task import Task
from advisor.tuners import environment
from advisor.tuners.act.pilot.script_facts import ScriptFacts, model_facts
from advisor.tuners.knobs import plain
from advisor.tuners.measure.run.mapped_options import MappedOptions
from advisor.tuners.measure.worker import child, parent
from advisor.tuners.measure.worker.bench import Bench
from advisor.tuners.measure.worker.wire import DataFacts, Facts, WorkerJob
from advisor.tuners.search.plan import Clock
from advisor.tuners.search.race import SearchResult
from advisor.tuning import Tuning
from tests.builders import GAINS, SCRIPT, MadeUp, net_of
from tests.cache import examples


class NoProcess(contextlib.AbstractContextManager[Any]):
    def __exit__(self, *_exc: object) -> None: ...


class InProcess(NoProcess):
    """A worker that runs the model's first steps and loads its data in this process."""

    def __init__(self, job: WorkerJob, *, deadline_s: float) -> None:
        self._job = job

    def describe(self) -> Facts:
        # As in a real worker, the model's output and deterministic flags stay inside.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            facts = child.describe(Bench(self._job))
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        return facts

    def describe_data(self, most_s: float) -> DataFacts:
        return Bench(self._job).describe_data()


class DescribedRun(NoProcess):
    """A run that is never started. Its script trains model.py's Net at 4x3x8x8 with SGD."""

    def __init__(self, command: Sequence[str], **_options: Any) -> None:
        self.command = MappedOptions(command, {})

    def describe(self) -> ScriptFacts:
        return dataclasses.replace(SCRIPT, **model_facts([net_of("model.py")]), shape=(4, 3, 8, 8))


@contextlib.contextmanager
def fake_search() -> Iterator[list[Task]]:
    """Tuning stores a made-up record instead of searching. Yields the tasks that it searched."""
    searched: list[Task] = []

    def search(tuning: Tuning, *_args: object) -> SearchResult:
        searched.append(tuning.task)
        made = examples.record(tuning.opened.key)
        return SearchResult(baseline=made.baseline, winners=made.winners, raced=made.raced)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parent, "Worker", InProcess)
        patch.setattr("advisor.tuners.measure.run.run.Run", DescribedRun)
        patch.setattr(Tuning, "search", search)
        patch.setattr(sys, "path", [*sys.path])
        yield searched


class FakeWorker(MadeUp, InProcess):
    """A worker that describes the real model and measures made-up speeds."""

    def __init__(self, job: WorkerJob, *, deadline_s: float, **options: Any) -> None:
        MadeUp.__init__(self, plain(job.task, job.device), **options)
        InProcess.__init__(self, job, deadline_s=deadline_s)


@contextlib.contextmanager
def fake_worker(
    gains: Mapping[tuple[str, object], float] = GAINS,
    *,
    kind: type[FakeWorker] = FakeWorker,
    **more: Any,
) -> Iterator[list[FakeWorker]]:
    """Replace the worker, its model's speed and its clock. Yields the workers started so far.
    `kind` is their class. The other arguments are those of MadeUp."""
    started: list[FakeWorker] = []

    def start(job: WorkerJob, *, deadline_s: float) -> FakeWorker:
        started.append(kind(job, deadline_s=deadline_s, gains=gains, **more))
        return started[-1]

    def now() -> float:
        return started[-1].time if started else 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parent, "Worker", start)
        for module in (tuning, verification):
            patch.setattr(module, "Clock", functools.partial(Clock, now=now))
        # bf16 is offered if `gains` has it, whatever the host.
        patch.setattr(environment, "cpu_has_bf16", lambda: ("precision", "bf16") in gains)
        patch.setattr(sys, "path", [*sys.path])
        yield started
