"""What several files of tests stand on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from advisor.cache.task import Task
from tests.face import unmeasured as without


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
