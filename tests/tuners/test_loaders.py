"""Changing the workers of a script's loaders within an epoch, and restoring them."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import threading
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
from advisor.tuners.measure.runner import Block
from tests.forks import until


class Indexed(Dataset[tuple[Tensor, int]]):
    """Each sample is its index, and whether a worker fetched it."""

    def __init__(
        self, length: int = 24, fetch: Callable[[int], object] = lambda _number: None
    ) -> None:
        self.length, self.fetch = length, fetch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if number >= self.length:
            raise IndexError(number)
        self.fetch(number)
        return torch.tensor(float(number)), int(get_worker_info() is not None)


class NumberStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


Settings = dict[str, Any]
WORKERS: Settings = {"num_workers": 2}


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    monkeypatch.setattr(host, "cores", lambda: 2)
    monkeypatch.setattr(host, "free_bytes", lambda: 2**50)
    monkeypatch.setattr(host, "files_read", list)  # ignore the files that pytest reads
    return []


@pytest.fixture
def patch(failures: list[Exception], request: pytest.FixtureRequest) -> Iterator[Loaders]:
    """The parameter says whether the script's own workers may be replaced."""
    patch = Loaders(failures.append, override=getattr(request, "param", False))
    yield patch
    patch.remove()
    gc.collect()
    assert DataLoader.__iter__.__module__ == DataLoader.__module__


with_override = pytest.mark.parametrize("patch", [True], indirect=True)


def observe(patch: Loaders, loader: DataLoader[Any]) -> LoaderFacts:
    """Return the facts observed after two batches."""
    for number, _batch in enumerate(loader):
        if number:
            break
    return patch.seen()


def epoch(
    loader: DataLoader[Any], on_batch: Callable[[int], object] = lambda _number: None
) -> tuple[list[list[int]], list[int]]:
    """Return the samples of each batch, and how many of them workers fetched. `on_batch` gets the
    number of batches so far."""
    samples, workers = [], []
    for number, (x, by_worker) in enumerate(loader):
        samples.append([int(one) for one in x])
        workers.append(int(by_worker.sum()))
        on_batch(number + 1)
    return samples, workers


LOADERS: dict[str, Callable[[Dataset[Any]], DataLoader[Any]]] = {
    "batches": lambda data: DataLoader(data, batch_size=5, shuffle=True, drop_last=True),
    "single samples": lambda data: DataLoader(
        data, batch_size=None, collate_fn=lambda one: (one[0][None], torch.tensor([one[1]]))
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_switching_workers_loses_no_sample(
    patch: Loaders, failures: list[Exception], kind: str
) -> None:
    loader = LOADERS[kind](Indexed())

    def epochs(on_batch: Callable[[int], object] = lambda _number: None) -> Any:
        torch.manual_seed(3)
        done = [epoch(loader, on_batch), epoch(loader)]
        return [samples for samples, _ in done], [workers for _, workers in done], torch.rand(1)

    plain, no_workers, random_number = epochs()
    assert not any(map(any, no_workers))
    assert observe(patch, loader).most == 2

    def on_batch(number: int) -> None:
        if number in (1, 3, 4):
            patch.set({} if number == 3 else WORKERS)

    samples, workers, after = epochs(on_batch)
    assert samples == plain
    assert list(map(bool, workers[0])) == [False, True, True, False, *[True] * 20][: len(plain[0])]
    assert all(workers[1])
    assert torch.equal(after, random_number)  # the script's random numbers are unchanged
    assert not failures


def batches_in_order() -> list[list[int]]:
    return [list(range(first, first + 3)) for first in range(0, 24, 3)]


def raises(_number: int) -> None:
    raise RuntimeError("not in a worker")


@pytest.mark.parametrize(
    ("fails", "message"),
    [(raises, "not in a worker"), (lambda _number: os.kill(os.getpid(), signal.SIGKILL), "")],
    ids=["raises", "is killed"],
)
def test_script_fetches_the_batches_of_failed_workers(
    patch: Loaders,
    failures: list[Exception],
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[[int], None],
    message: str,
) -> None:
    monkeypatch.setattr(loaders, "BATCH_TIMEOUT_S", 0.5)
    data = Indexed(fetch=lambda number: number == 10 and get_worker_info() and fails(number))
    loader = DataLoader(data, batch_size=3)
    observe(patch, loader)
    patch.set(WORKERS)
    samples, workers = epoch(loader)
    assert samples == batches_in_order()
    assert len(failures) == 1 and message in str(failures[0]) and not patch.at_work
    assert workers[0] == 3 and not any(workers[3:])


class FailingSampler:
    """A sampler that raises at its tenth index."""

    def __iter__(self) -> Iterator[int]:
        yield from range(9)
        raises(9)


RAISING = Indexed(fetch=lambda number: number == 10 and raises(number))


@pytest.mark.parametrize(("data", "sampler"), [(RAISING, None), (Indexed(), FailingSampler())])
def test_data_errors_reach_the_script(patch: Loaders, data: Indexed, sampler: Any) -> None:
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    observe(patch, loader)
    patch.set(WORKERS)
    batches: list[int] = []
    with pytest.raises(RuntimeError, match=r"^not in a worker$"):
        epoch(loader, batches.append)
    assert batches == [1, 2, 3]


def test_evaluation_keeps_its_workers_and_a_recreated_loader_is_known(patch: Loaders) -> None:
    data, by_worker = Indexed(), []
    evaluation: DataLoader[Any] = DataLoader(data, batch_size=3)
    for turn in range(2):
        trained = epoch(DataLoader(data, batch_size=3))[1]
        with torch.no_grad():
            by_worker.append((any(trained), any(epoch(evaluation)[1])))
        if not turn:
            patch.seen()
            patch.set(WORKERS)
    assert by_worker == [(False, False), (True, False)]
    # Batches from before the first step belong to no training loader.
    epoch(DataLoader(data, batch_size=3))
    patch.restart_observation()
    assert not patch.seen().room


@pytest.mark.parametrize(("shared_bytes", "ahead"), [(2**30, 4), (24, 2)])
def test_prefetch_factor_is_applied_as_far_as_shared_memory_allows(
    patch: Loaders, monkeypatch: pytest.MonkeyPatch, shared_bytes: int, ahead: int
) -> None:
    monkeypatch.setattr(host, "shared_bytes", lambda: (shared_bytes, shared_bytes))
    requested: list[int] = []

    class Recording:
        def __iter__(self) -> Iterator[int]:
            return (requested.append(number) or number for number in range(24))

    loader = DataLoader(Indexed(), batch_size=None, sampler=Recording())  # type: ignore[arg-type]
    assert observe(patch, loader).most
    requested.clear()
    patch.set({"num_workers": 1, "prefetch_factor": 4})
    next(iter(loader))
    assert len(requested) == 1 + ahead


STREAM = "the loader: every worker would read all of an IterableDataset"
PERSISTENT = "the loader: its workers stay from one epoch to the next"
SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn"}


@pytest.mark.parametrize(
    ("patch", "data", "own", "why"),
    [
        (False, Indexed(), {"num_workers": 1}, ""),
        (False, NumberStream(), {}, STREAM),
        (True, NumberStream(), {"num_workers": 1}, STREAM),
        (True, Indexed(), {"num_workers": 1, "persistent_workers": True}, PERSISTENT),
        (False, Indexed(), {}, "the loader: ADVISOR_KEEP_LOADER is set"),
    ],
    indirect=["patch"],
    ids=["own workers", "stream", "stream with workers", "persistent", "kept by the user"],
)
def test_loaders_that_must_not_change_are_untouched(
    patch: Loaders, monkeypatch: pytest.MonkeyPatch, data: Dataset[Any], own: Settings, why: str
) -> None:
    if "ADVISOR_KEEP_LOADER" in why:
        monkeypatch.setenv("ADVISOR_KEEP_LOADER", "1")
    loader: DataLoader[Any] = DataLoader(data, **own)
    plain = [str(batch) for batch in loader]
    assert observe(patch, loader) == LoaderFacts(workers=len(own) and 1, room=2, why=why)
    patch.set(WORKERS)
    assert [str(batch) for batch in loader] == plain


def test_loader_whose_workers_are_not_forked_is_untouched() -> None:
    """Only forked workers inherit the script's objects and file positions."""
    spawned: DataLoader[Any] = DataLoader(Indexed(), **SPAWNED)
    assert loaders._why_untouched(spawned) == "the loader: its workers are not forked"


@with_override
def test_own_workers_are_replaced_mid_epoch(patch: Loaders, failures: list[Exception]) -> None:
    """The script's own workers return when the override ends."""
    own: Settings = {"num_workers": 1, "prefetch_factor": 3}
    loader = DataLoader(Indexed(), batch_size=3, shuffle=True, **own)
    alive: list[int] = []
    before = {child.pid for child in multiprocessing.active_children()}

    def on_batch(number: int) -> None:
        alive.append(len({child.pid for child in multiprocessing.active_children()} - before))
        assert (loader.num_workers, loader.prefetch_factor) == (1, 3)
        if number in (2, 4):
            patch.set({"num_workers": 2} if number == 2 else {})

    assert observe(patch, loader) == LoaderFacts(workers=1, prefetch_factor=3, most=2, room=2)
    samples, workers = epoch(loader, on_batch)
    assert sorted(itertools.chain(*samples)) == list(range(24)) and all(workers)
    assert (alive[1], alive[2], alive[4]) == (1, 2, 1)
    assert not failures and patch.at_work
    held_out = DataLoader(Indexed(), batch_size=3, num_workers=1)
    with torch.no_grad():
        assert all(epoch(held_out)[1])  # its own worker


@with_override
def test_own_workers_return_after_a_failure(patch: Loaders, failures: list[Exception]) -> None:
    failed = multiprocessing.Event()

    def fetch(number: int) -> None:
        if number == 10 and get_worker_info() and not failed.is_set():
            failed.set()
            raises(number)

    loader = DataLoader(Indexed(fetch=fetch), batch_size=3, num_workers=1)
    samples, workers = epoch(loader)
    assert samples == batches_in_order() and len(failures) == 1
    assert workers[:3] == [3, 3, 3] and not any(workers[3:])
    assert all(epoch(loader)[1]) and not patch.at_work


def test_files_read_lists_files_open_for_reading(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * 5000)
    (font := tmp_path / "letters.ttf").write_text("kept open by matplotlib")
    before = host.files_read()
    assert str(file) not in before
    with file.open("rb"), font.open("rb"):
        assert host.files_read() == sorted([*before, str(file)])
    with file.open("ab"):
        assert host.files_read() == before


def test_workers_end_when_the_script_drops_the_iterator(patch: Loaders) -> None:
    loader = DataLoader(Indexed(), batch_size=3)
    observe(patch, loader)
    gc.disable()
    try:
        before = len(multiprocessing.active_children())
        patch.set(WORKERS)
        batches = iter(loader)
        next(batches)
        assert len(multiprocessing.active_children()) == before + 2
        del batches
        assert len(multiprocessing.active_children()) == before
    finally:
        gc.enable()


def test_drained_share_is_what_workers_cannot_make_in_a_block(
    patch: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two workers takes a second for a batch."""
    now = multiprocessing.Value("d", 1.0)
    seconds = threading.local()  # of this process: it starts at the same time in a worker

    def clock() -> float:
        seconds.own = getattr(seconds, "own", 0.0) + (get_worker_info() is not None)
        return now.value + seconds.own

    monkeypatch.setattr(loaders.time, "perf_counter", clock)
    batches = iter(DataLoader(Indexed(length=40), batch_size=1, num_workers=2, prefetch_factor=8))

    def share(taken: int, seconds: float) -> float:
        patch.begin_block()
        for _ in range(taken):
            next(batches)
        until(lambda: loaders._outstanding(batches)[1] == 0)  # no worker reads the clock
        now.value += seconds
        return Block(seconds=seconds, loader_load=patch.load).waited_share

    assert share(4, seconds=2.0) == 0  # as many as two workers make
    assert share(4, seconds=1.0) == pytest.approx(0.5)
    assert share(4, seconds=0.25) == pytest.approx(0.875)
    assert share(1, seconds=60.0) == 0 and patch.load == pytest.approx(1 / 120)
