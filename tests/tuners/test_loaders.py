"""The loaders of a script: workers for what feeds its steps, in the middle of an epoch and back."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from advisor.tuners import host
from advisor.tuners.act.pilot import loaders
from advisor.tuners.act.pilot.loaders import Loaders
from advisor.tuners.knobs import LoaderFacts


class Numbered(Dataset[tuple[Tensor, int]]):
    """Samples that tell their own number, and whether a worker fetched them."""

    def __init__(self, length: int = 24) -> None:
        self.length = length
        self.fetch: Callable[[int], None] = lambda _number: None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if number >= self.length:
            raise IndexError(number)
        self.fetch(number)
        return torch.tensor(float(number)), int(get_worker_info() is not None)


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


Given = dict[str, Any]
WORKERS: Given = {"num_workers": 2}


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    monkeypatch.setattr(host, "cores", lambda: 2)
    monkeypatch.setattr(host, "free_bytes", lambda: 2**50)
    monkeypatch.setattr(host, "files_read", list)  # pytest's own
    return []


@pytest.fixture
def fed(failures: list[Exception]) -> Iterator[Loaders]:
    found = Loaders(failures.append)
    yield found
    found.remove()
    assert DataLoader.__iter__.__module__ == DataLoader.__module__


def looked_at(fed: Loaders, loader: DataLoader[Any]) -> LoaderFacts:
    """After two batches of an epoch that a step was made with."""
    for number, _batch in enumerate(loader):
        if number:
            break
    return fed.seen()


def epoch(
    loader: DataLoader[Any], at: Callable[[int], object] = lambda _number: None
) -> tuple[list[list[int]], list[int]]:
    """(The samples of every batch, for each how many of them a worker fetched); `at` is told of the
    batches that have come so far."""
    samples, workers = [], []
    for number, (x, by_worker) in enumerate(loader):
        samples.append([int(one) for one in x])
        workers.append(int(by_worker.sum()))
        at(number + 1)
    return samples, workers


HOW: dict[str, Callable[[Dataset[Any]], DataLoader[Any]]] = {
    "batches": lambda data: DataLoader(data, batch_size=5, shuffle=True, drop_last=True),
    "one by one": lambda data: DataLoader(
        data, batch_size=None, collate_fn=lambda one: (one[0][None], torch.tensor([one[1]]))
    ),
}


@pytest.mark.parametrize("how", HOW)
def test_workers_come_and_go_within_an_epoch_and_no_sample_is_lost(
    fed: Loaders, failures: list[Exception], how: str
) -> None:
    loader = HOW[how](Numbered())

    def epochs(at: Callable[[int], object] = lambda _number: None) -> Any:
        torch.manual_seed(3)
        found = [epoch(loader, at), epoch(loader)]
        return [samples for samples, _ in found], [workers for _, workers in found], torch.rand(1)

    plain, nobody, drawn = epochs()
    assert not any(map(any, nobody))
    assert looked_at(fed, loader).most == 2

    def at(number: int) -> None:
        if number in (1, 3, 4):
            fed.set({} if number == 3 else WORKERS)

    samples, workers, after = epochs(at)
    assert samples == plain
    assert list(map(bool, workers[0])) == [False, True, True, False, *[True] * 20][: len(plain[0])]
    assert all(workers[1])
    assert torch.equal(after, drawn)  # the script's own random numbers are what they were
    assert not failures


def test_what_workers_raise_is_fetched_by_the_script(
    fed: Loaders, failures: list[Exception]
) -> None:
    data = Numbered()

    def fetch(number: int) -> None:
        if get_worker_info() is not None and number == 10:
            raise RuntimeError("not in a worker")

    data.fetch = fetch
    loader = DataLoader(data, batch_size=3)
    looked_at(fed, loader)
    fed.set(WORKERS)
    samples, workers = epoch(loader)
    assert samples == [list(range(at, at + 3)) for at in range(0, 24, 3)]
    assert workers[:3] == [3, 3, 3]
    assert not any(workers[3:])
    assert len(failures) == 1
    assert "not in a worker" in str(failures[0])
    assert not fed.at_work


def test_a_worker_that_is_killed_is_missed_when_its_batch_is_due(
    fed: Loaders, failures: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "BATCH_TIMEOUT_S", 0.5)
    data = Numbered()

    def fetch(number: int) -> None:
        if get_worker_info() is not None and number == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    data.fetch = fetch
    loader = DataLoader(data, batch_size=3)
    looked_at(fed, loader)
    fed.set(WORKERS)
    samples, _workers = epoch(loader)
    assert samples == [list(range(at, at + 3)) for at in range(0, 24, 3)]
    assert len(failures) == 1


def test_what_the_data_raises_is_the_scripts(fed: Loaders) -> None:
    data = Numbered()

    def fetch(number: int) -> None:
        if number == 10:
            raise LookupError("a bad sample")

    data.fetch = fetch
    loader = DataLoader(data, batch_size=3)
    looked_at(fed, loader)
    fed.set(WORKERS)
    with pytest.raises(LookupError, match=r"^a bad sample$"):
        epoch(loader)


def test_what_a_sampler_raises_is_raised_at_its_turn(fed: Loaders) -> None:
    def batches() -> Iterator[list[int]]:
        yield from ([0], [1], [2], [3])
        raise LookupError("no more")

    class Failing:
        def __iter__(self) -> Iterator[list[int]]:
            return batches()

    loader: DataLoader[Any] = DataLoader(Numbered(), batch_sampler=Failing())  # type: ignore[arg-type]
    looked_at(fed, loader)
    fed.set(WORKERS)
    seen: list[int] = []
    with pytest.raises(LookupError, match="no more"):
        epoch(loader, seen.append)
    assert seen == [1, 2, 3, 4]


def test_evaluation_is_left_alone_and_a_loader_that_is_made_anew_is_known(fed: Loaders) -> None:
    data = Numbered()

    def training() -> tuple[list[list[int]], list[int]]:
        return epoch(DataLoader(data, batch_size=3))

    evaluation: DataLoader[Any] = DataLoader(data, batch_size=3)

    def evaluated() -> list[int]:
        with torch.no_grad():
            return epoch(evaluation)[1]

    def both() -> tuple[list[int], list[int]]:
        return training()[1], evaluated()

    for turn in range(2):
        trained, held_out = both()
        assert not any(held_out)
        assert bool(any(trained)) == bool(turn)
        if not turn:
            fed.seen()
            fed.set(WORKERS)


def test_what_was_fetched_before_the_first_step_feeds_none(fed: Loaders) -> None:
    epoch(DataLoader(Numbered(), batch_size=3))
    fed.restart_observation()
    assert not fed.seen().room


class Said:
    """A sampler that tells what it was asked for."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for number in range(24):
            self.numbers.append(number)
            yield number


@pytest.mark.parametrize(("shared_bytes", "ahead"), [(2**30, 4), (24, 2)])
def test_workers_fetch_as_far_ahead_as_is_told_and_fits(
    fed: Loaders, monkeypatch: pytest.MonkeyPatch, shared_bytes: int, ahead: int
) -> None:
    monkeypatch.setattr(host, "shared_bytes", lambda: (shared_bytes, shared_bytes))
    said = Said()
    loader = DataLoader(Numbered(), batch_size=None, sampler=said)
    assert looked_at(fed, loader).most
    said.numbers.clear()
    fed.set({"num_workers": 1, "prefetch_factor": 4})
    next(iter(loader))
    assert len(said.numbers) == 1 + ahead


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (lambda: DataLoader(Numbered(), num_workers=1), LoaderFacts(workers=1, room=2)),
        (
            lambda: DataLoader(Streamed()),
            LoaderFacts(
                room=2, why="the loader: of an IterableDataset every worker would read all"
            ),
        ),
    ],
)
def test_what_is_left_alone(
    fed: Loaders, loader: Callable[[], DataLoader[Any]], expected: LoaderFacts
) -> None:
    one = loader()
    plain = [str(batch) for batch in one]
    assert looked_at(fed, one) == expected
    fed.set(WORKERS)
    assert not fed.at_work
    assert [str(batch) for batch in one] == plain


@pytest.fixture
def taking(failures: list[Exception]) -> Iterator[Loaders]:
    found = Loaders(failures.append, override=True)
    yield found
    found.remove()
    gc.collect()
    assert DataLoader.__iter__.__module__ == DataLoader.__module__


def test_workers_of_the_scripts_own_give_way_within_an_epoch_where_they_may(
    taking: Loaders, failures: list[Exception]
) -> None:
    """They work as the script has it until then, and again once that is over."""
    own: Given = {"num_workers": 1, "prefetch_factor": 3}
    loader = DataLoader(Numbered(), batch_size=3, shuffle=True, **own)
    seen: list[int] = []
    before = {child.pid for child in multiprocessing.active_children()}

    def at(number: int) -> None:
        seen.append(len({child.pid for child in multiprocessing.active_children()} - before))
        assert (loader.num_workers, loader.prefetch_factor) == (1, 3)
        if number in (2, 4):
            taking.set({"num_workers": 2} if number == 2 else {})

    assert looked_at(taking, loader) == LoaderFacts(workers=1, prefetch_factor=3, most=2, room=2)
    samples, workers = epoch(loader, at)
    assert sorted(itertools.chain(*samples)) == list(range(24)) and all(workers)
    assert seen[1] == 1 and seen[2] == 2 and seen[4] == 1
    assert not failures and taking.at_work
    held_out = DataLoader(Numbered(), batch_size=3, num_workers=1)
    with torch.no_grad():
        assert all(epoch(held_out)[1])  # with its own


def test_whose_workers_stay_all_the_same(taking: Loaders) -> None:
    found = looked_at(taking, DataLoader(Streamed(), num_workers=1))
    assert (found.workers, found.most) == (1, 0)
    assert found.why == "the loader: of an IterableDataset every worker would read all"
    spawned: DataLoader[Any] = DataLoader(
        Numbered(), num_workers=1, multiprocessing_context="spawn"
    )
    assert loaders._why_untouched(spawned) == "the loader: its workers are not forked"
    staying: DataLoader[Any] = DataLoader(Numbered(), num_workers=1, persistent_workers=True)
    assert (
        loaders._why_untouched(staying) == "the loader: its workers stay from one epoch to the next"
    )


def test_advisors_own_workers_are_not_taken_over(
    taking: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[DataLoader[Any]] = []
    plain = loaders._why_untouched
    monkeypatch.setattr(loaders, "_why_untouched", lambda one: asked.append(one) or plain(one))
    loader: DataLoader[Any] = DataLoader(Numbered(), batch_size=3, num_workers=1)
    for _epoch in range(2):
        assert all(epoch(loader)[1])
    assert set(asked) == {loader}


def test_what_fails_in_taken_workers_is_fetched_and_the_next_epoch_has_its_own(
    taking: Loaders, failures: list[Exception]
) -> None:
    data, parent = Numbered(), os.getpid()

    def fetch(number: int) -> None:
        if number == 10 and os.getpid() != parent and not failed.is_set():
            failed.set()
            raise RuntimeError("once")

    failed = multiprocessing.Event()
    data.fetch = fetch
    loader = DataLoader(data, batch_size=3, num_workers=1)
    samples, workers = epoch(loader)
    assert samples == [list(range(at, at + 3)) for at in range(0, 24, 3)]
    assert workers[:3] == [3, 3, 3] and not any(workers[3:]) and len(failures) == 1
    assert all(epoch(loader)[1])
    assert not taking.at_work


def test_it_may_be_asked_to_leave_loaders_alone(
    fed: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADVISOR_KEEP_LOADER", "1")
    why = "the loader: ADVISOR_KEEP_LOADER is set"
    assert looked_at(fed, DataLoader(Numbered())) == LoaderFacts(room=2, why=why)


def test_files_that_are_read_by_position(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * 5000)
    before = host.files_read()
    assert str(file) not in before
    with file.open("rb"):
        assert host.files_read() == sorted([*before, str(file)])
    with file.open("ab"):
        assert host.files_read() == before


def test_a_loader_that_keeps_its_workers_is_not_kept(fed: Loaders) -> None:
    loader: DataLoader[Any] = DataLoader(Numbered(), num_workers=1, persistent_workers=True)
    looked_at(fed, loader)
    kept = weakref.ref(loader)
    del loader
    gc.collect()
    assert kept() is None


def test_workers_end_with_the_iterator_that_a_script_drops(fed: Loaders) -> None:
    loader = DataLoader(Numbered(), batch_size=3)
    looked_at(fed, loader)
    gc.disable()
    try:
        before = len(multiprocessing.active_children())
        fed.set(WORKERS)
        batches = iter(loader)
        next(batches)
        assert len(multiprocessing.active_children()) == before + 2
        del batches
        assert len(multiprocessing.active_children()) == before
    finally:
        gc.enable()


def test_what_workers_have_left_to_do_is_seen_though_batches_lie_ready(fed: Loaders) -> None:
    data, gate = Numbered(), multiprocessing.Event()

    def fetch(number: int) -> None:
        assert number < 2 or gate.wait(60)

    def unfinished() -> int:
        return fed._queued()[1]

    def until(left: int) -> None:
        end = time.monotonic() + 60
        while unfinished() != left:
            assert time.monotonic() < end, unfinished()

    data.fetch = fetch
    batches = iter(DataLoader(data, batch_size=1, num_workers=2, prefetch_factor=3))
    until(4)  # six were asked for, two are there
    fed.begin_block()
    next(batches)
    assert (fed.taken, fed.drained_share, unfinished()) == (1, 0.0, 5)  # one may be chance
    next(batches)
    assert (fed.taken, fed.drained_share, unfinished()) == (2, 0.5, 6)
    gate.set()
    until(0)
    assert sum(1 for _batch in batches) == 22
    assert (fed.taken, fed.drained_share, unfinished()) == (24, 0.0, 0)
