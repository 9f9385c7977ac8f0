"""What several files of tests stand on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from advisor.cache.task import Task
from advisor.tuners.environment import own_threads
from tests.face import unmeasured as without
from tests.face.commands import MODEL

THREADS = own_threads()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with model.py; the process's flags are put back afterwards."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


@pytest.fixture
def unmeasured() -> Iterator[list[Task]]:
    """Tuning remembers a made-up record; the tasks that were measured, not found tuned already."""
    with without.unmeasured() as measured:
        yield measured


@pytest.fixture
def made_up() -> Iterator[list[without.Worker]]:
    """Tuning searches and races as ever, on a model of made-up speed; the workers so far."""
    with without.made_up() as workers:
        yield workers
