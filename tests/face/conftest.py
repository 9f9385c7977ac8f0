"""Fixtures of this folder's tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from advisor.cache.task import Task
from advisor.tuners.environment import own_threads
from tests.face.commands import MODEL
from tests.face.unmeasured import FakeWorker, fake_search, fake_worker

THREADS = own_threads()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a model.py. Flags of the process are restored afterwards."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


@pytest.fixture
def searched() -> Iterator[list[Task]]:
    """Tuning stores a made-up record instead of searching. Returns the tasks searched so far."""
    with fake_search() as tasks:
        yield tasks


@pytest.fixture
def fake_workers() -> Iterator[list[FakeWorker]]:
    """Tuning searches and races on a model of made-up speed. Returns the workers started so far."""
    with fake_worker() as workers:
        yield workers


@pytest.fixture
def tuned(project: Path, own_surroundings: Path) -> Path:
    """The module's `project`. The test may change its store and key, which are copies."""
    for name, variable in (("store", "ADVISOR_CACHE"), ("data", "XDG_DATA_HOME")):
        shutil.copytree(project / name, os.environ[variable])
    return project
