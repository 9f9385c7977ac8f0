"""Tuning without measuring anything: the worker builds the model, and a record is made up."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Record
from advisor.cache.task import Task
from advisor.keeping import keep
from advisor.tuners import fingerprint
from advisor.tuners import target as targets
from advisor.tuners.environment import own_threads
from advisor.tuners.measure.worker import parent
from advisor.tuners.measure.worker.bench import code_of
from advisor.tuners.measure.worker.description import recognise
from advisor.tuners.measure.worker.wire import Facts, Job
from advisor.tuning import _Tuning
from tests.cache import examples


class Describing:
    """A worker that builds the model and knows it again, in this process, and measures nothing."""

    def __init__(self, job: Job, *, deadline_s: float) -> None:
        self._job = job

    def __enter__(self) -> Describing:
        return self

    def __exit__(self, *_exc: object) -> None: ...

    def describe(self) -> Facts:
        task = self._job.task
        # What a model prints stays with its worker.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            loaded = targets.load(targets.parse(task.target), task.model_args)
            recognise(self._job, loaded)
            model = targets.build(loaded)
        modules, parameters = fingerprint.size(model)
        return Facts(
            name=loaded.spec.name,
            model=fingerprint.of_model(model),
            hooks=fingerprint.of_hooks(loaded.make_batch, loaded.loss),
            code=code_of(loaded.spec),
            libraries=fingerprint.libraries(model),
            family=fingerprint.family(model),
            modules=modules,
            parameters=parameters,
            convolves=True,
            repeats=False,
            draws=False,
            threads=own_threads(),
            device_uuid="",
            memory_bytes=0,
            peak_bytes=1,
            step_s=0.001,
        )


@contextlib.contextmanager
def unmeasured() -> Iterator[list[Task]]:
    """Tuning remembers a made-up record; the tasks that would have been measured."""
    measured: list[Task] = []

    def tune(self: Any, subject: Any, near: Sequence[Config], before: Any) -> Record:
        measured.append(subject.key.task)
        made = examples.record(subject.key)
        plan = self._plan
        provenance = dataclasses.replace(
            made.provenance,
            study=subject.study,
            effort=plan.effort,
            steps=plan.steps or 0,
            duration_s=plan.duration_s or 0.0,
        )
        record = dataclasses.replace(
            made, target=subject.target, input=Config(), provenance=provenance, trials=()
        )
        keep(self._records, record, before.fresh, self._progress)
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parent, "Worker", Describing)
        patch.setattr(_Tuning, "_tune", tune)
        patch.setattr(sys, "path", [*sys.path])
        yield measured
