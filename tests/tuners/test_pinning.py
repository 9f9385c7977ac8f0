"""Batches of a script's own workers are pinned in the middle of an epoch, and none is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from advisor.tuners.act.pilot import pinning
from advisor.tuners.act.pilot.loaders import Loaders
from advisor.tuners.knobs import BY_NAME, Own, Script

PINNED = {"num_workers": 2, "pin_memory": True}


class Numbers(Dataset[Tensor]):
    def __init__(self, length: int = 24, fails_at: int = -1) -> None:
        self.length, self.fails_at = length, fails_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Tensor:
        if number == self.fails_at:
            raise ValueError("this sample is broken")
        if self.fails_at < -1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(float(number))


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaders]:
    # Without a GPU nothing can be pinned: what would be is negative here.
    monkeypatch.setattr(pinning, "pin_memory", _negated)
    found = Loaders(lambda exc: pytest.fail(str(exc)))
    yield found
    found.remove()


def _negated(batch: Any) -> Any:
    """Turns 0, 1, 2 into -1, -2, -3."""
    return -1 - batch if isinstance(batch, Tensor) else batch


def samples(batch: Tensor) -> list[int]:
    return [int(one if one >= 0 else -1 - one) for one in batch]


def pinned(batch: Tensor) -> bool:
    return bool((batch < 0).all())


def threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "advisor-pin"}


def test_it_begins_and_ends_within_an_epoch_and_no_batch_is_lost(loaders: Loaders) -> None:
    data = DataLoader(Numbers(), batch_size=2, num_workers=1)
    found, seen = [], []
    for number, batch in enumerate(data):
        found += samples(batch)
        seen.append(pinned(batch))
        if number in (1, 7):
            loaders.set(PINNED if number == 1 else {})
    assert found == list(range(24))
    assert not any(seen[:2])
    assert all(seen[2:8])
    assert not any(seen[8 + pinning.AHEAD :])


def test_each_later_epoch_is_pinned_and_evaluation_is_not(loaders: Loaders) -> None:
    data = DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers=True)
    loaders.set(PINNED)
    for _epoch in range(2):
        batches = list(data)
        assert all(map(pinned, batches))
        assert [one for batch in batches for one in samples(batch)] == list(range(24))
    with torch.no_grad():
        assert not any(map(pinned, DataLoader(Numbers(), batch_size=4, num_workers=1)))


def test_a_batch_of_its_own_kind_comes_as_it_is(
    loaders: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_batch: Any) -> Any:
        raise TypeError("cannot be pinned")

    monkeypatch.setattr(pinning, "pin_memory", fails)
    loaders.set(PINNED)
    batches = list(DataLoader(Numbers(), batch_size=4, num_workers=2))
    assert [one for batch in batches for one in samples(batch)] == list(range(24))


def test_what_the_data_raises_is_raised_where_it_would_be(loaders: Loaders) -> None:
    loaders.set(PINNED)
    found = []
    with pytest.raises(ValueError, match="this sample is broken"):
        found.extend(DataLoader(Numbers(fails_at=9), batch_size=2, num_workers=2))
    assert len(found) == 4


def test_a_worker_that_dies_is_missed_as_without(loaders: Loaders) -> None:
    loaders.set(PINNED)
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|is killed by signal"):
        list(DataLoader(Numbers(fails_at=-2), batch_size=2, num_workers=1))


def test_an_epoch_that_is_left_early_leaves_no_thread(loaders: Loaders) -> None:
    loaders.set(PINNED)
    before = threads()
    iterator = iter(DataLoader(Numbers(), batch_size=2, num_workers=2))
    next(iterator)
    (thread,) = threads() - before
    del iterator
    thread.join(60)
    assert not thread.is_alive()


def test_it_is_offered_where_the_script_has_workers_and_does_not_pin(loaders: Loaders) -> None:
    def offered(**given: Any) -> Own | None:
        seen = Loaders(lambda exc: pytest.fail(str(exc)))
        for number, _batch in enumerate(DataLoader(Numbers(), batch_size=2, **given)):
            if number:
                break
        loading = seen.seen()
        seen.remove()
        own = BY_NAME["pin_memory"].script
        assert own is not None
        return own(Script(weights=(), loading=loading))

    assert offered(num_workers=1) is None
