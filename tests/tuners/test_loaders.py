"""The loaders of a script: workers for what feeds its steps, in the middle of an epoch and back."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
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
from tests.forks import until


class Numbered(Dataset[tuple[Tensor, int]]):
    """Samples that tell their own number, and whether a worker fetched them."""

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
def fed(failures: list[Exception], request: pytest.FixtureRequest) -> Iterator[Loaders]:
    """Those of a script; the parameter says whether its own workers may give way."""
    found = Loaders(failures.append, override=getattr(request, "param", False))
    yield found
    found.remove()
    gc.collect()
    assert DataLoader.__iter__.__module__ == DataLoader.__module__


taking = pytest.mark.parametrize("fed", [True], indirect=True)


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
def test_switching_workers_loses_no_sample(
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


def in_order() -> list[list[int]]:
    return [list(range(at, at + 3)) for at in range(0, 24, 3)]


def raises(_number: int) -> None:
    raise RuntimeError("not in a worker")


@pytest.mark.parametrize(
    ("fails", "said"),
    [(raises, "not in a worker"), (lambda _number: os.kill(os.getpid(), signal.SIGKILL), "")],
    ids=["raises", "is killed"],
)
def test_what_workers_fail_at_is_fetched_by_the_script(
    fed: Loaders,
    failures: list[Exception],
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[[int], None],
    said: str,
) -> None:
    """One that was killed is missed when its batch is due."""
    monkeypatch.setattr(loaders, "BATCH_TIMEOUT_S", 0.5)
    data = Numbered(fetch=lambda number: number == 10 and get_worker_info() and fails(number))
    loader = DataLoader(data, batch_size=3)
    looked_at(fed, loader)
    fed.set(WORKERS)
    samples, workers = epoch(loader)
    assert samples == in_order()
    assert len(failures) == 1 and said in str(failures[0]) and not fed.at_work
    assert workers[0] == 3 and not any(workers[3:])


class Failing:
    """A sampler that raises at its turn, though workers fetch ahead."""

    def __iter__(self) -> Iterator[int]:
        yield from range(9)
        raises(9)


BAD = Numbered(fetch=lambda number: number == 10 and raises(number))


@pytest.mark.parametrize(("data", "sampler"), [(BAD, None), (Numbered(), Failing())])
def test_what_the_data_raises_is_the_scripts(fed: Loaders, data: Numbered, sampler: Any) -> None:
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    looked_at(fed, loader)
    fed.set(WORKERS)
    seen: list[int] = []
    with pytest.raises(RuntimeError, match=r"^not in a worker$"):
        epoch(loader, seen.append)
    assert seen == [1, 2, 3]


def test_evaluation_is_left_alone_and_a_loader_that_is_made_anew_is_known(fed: Loaders) -> None:
    data, found = Numbered(), []
    evaluation: DataLoader[Any] = DataLoader(data, batch_size=3)
    for turn in range(2):
        trained = epoch(DataLoader(data, batch_size=3))[1]
        with torch.no_grad():
            found.append((any(trained), any(epoch(evaluation)[1])))
        if not turn:
            fed.seen()
            fed.set(WORKERS)
    assert found == [(False, False), (True, False)]
    # What was fetched before the first step feeds none.
    epoch(DataLoader(data, batch_size=3))
    fed.restart_observation()
    assert not fed.seen().room


@pytest.mark.parametrize(("shared_bytes", "ahead"), [(2**30, 4), (24, 2)])
def test_workers_fetch_as_far_ahead_as_is_told_and_fits(
    fed: Loaders, monkeypatch: pytest.MonkeyPatch, shared_bytes: int, ahead: int
) -> None:
    monkeypatch.setattr(host, "shared_bytes", lambda: (shared_bytes, shared_bytes))
    asked: list[int] = []

    class Said:
        def __iter__(self) -> Iterator[int]:
            return (asked.append(number) or number for number in range(24))

    loader = DataLoader(Numbered(), batch_size=None, sampler=Said())  # type: ignore[arg-type]
    assert looked_at(fed, loader).most
    asked.clear()
    fed.set({"num_workers": 1, "prefetch_factor": 4})
    next(iter(loader))
    assert len(asked) == 1 + ahead


SHARED = "the loader: every worker would read all of an IterableDataset"
STAY = "the loader: its workers stay from one epoch to the next"
SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn"}


@pytest.mark.parametrize(
    ("fed", "data", "own", "why"),
    [
        (False, Numbered(), {"num_workers": 1}, ""),
        (False, Streamed(), {}, SHARED),
        (True, Streamed(), {"num_workers": 1}, SHARED),
        (True, Numbered(), {"num_workers": 1, "persistent_workers": True}, STAY),
        (False, Numbered(), {}, "the loader: ADVISOR_KEEP_LOADER is set"),
    ],
    indirect=["fed"],
    ids=["own workers", "stream", "own of a stream", "persistent", "kept by the user"],
)
def test_left_alone(
    fed: Loaders, monkeypatch: pytest.MonkeyPatch, data: Dataset[Any], own: Given, why: str
) -> None:
    # Only forked workers inherit what a script has, and its places in files.
    spawned: DataLoader[Any] = DataLoader(Numbered(), **SPAWNED)
    assert loaders._why_untouched(spawned) == "the loader: its workers are not forked"
    if "ADVISOR_KEEP_LOADER" in why:
        monkeypatch.setenv("ADVISOR_KEEP_LOADER", "1")
    one: DataLoader[Any] = DataLoader(data, **own)
    plain = [str(batch) for batch in one]
    assert looked_at(fed, one) == LoaderFacts(workers=len(own) and 1, room=2, why=why)
    fed.set(WORKERS)
    assert [str(batch) for batch in one] == plain


@taking
def test_own_workers_are_replaced_within_an_epoch(fed: Loaders, failures: list[Exception]) -> None:
    """They work as the script has it until then, and again once that is over."""
    own: Given = {"num_workers": 1, "prefetch_factor": 3}
    loader = DataLoader(Numbered(), batch_size=3, shuffle=True, **own)
    seen: list[int] = []
    before = {child.pid for child in multiprocessing.active_children()}

    def at(number: int) -> None:
        seen.append(len({child.pid for child in multiprocessing.active_children()} - before))
        assert (loader.num_workers, loader.prefetch_factor) == (1, 3)
        if number in (2, 4):
            fed.set({"num_workers": 2} if number == 2 else {})

    assert looked_at(fed, loader) == LoaderFacts(workers=1, prefetch_factor=3, most=2, room=2)
    samples, workers = epoch(loader, at)
    assert sorted(itertools.chain(*samples)) == list(range(24)) and all(workers)
    assert seen[1] == 1 and seen[2] == 2 and seen[4] == 1
    assert not failures and fed.at_work
    held_out = DataLoader(Numbered(), batch_size=3, num_workers=1)
    with torch.no_grad():
        assert all(epoch(held_out)[1])  # with its own


@taking
def test_after_a_failure_own_workers_are_back(fed: Loaders, failures: list[Exception]) -> None:
    failed = multiprocessing.Event()

    def fetch(number: int) -> None:
        if number == 10 and get_worker_info() and not failed.is_set():
            failed.set()
            raises(number)

    loader = DataLoader(Numbered(fetch=fetch), batch_size=3, num_workers=1)
    samples, workers = epoch(loader)
    assert samples == in_order() and len(failures) == 1
    assert workers[:3] == [3, 3, 3] and not any(workers[3:])
    assert all(epoch(loader)[1]) and not fed.at_work


def test_files_that_are_read_by_position(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * 5000)
    before = host.files_read()
    assert str(file) not in before
    with file.open("rb"):
        assert host.files_read() == sorted([*before, str(file)])
    with file.open("ab"):
        assert host.files_read() == before


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

    data.fetch = fetch
    batches = iter(DataLoader(data, batch_size=1, num_workers=2, prefetch_factor=3))
    until(lambda: fed._queued()[1] == 4)  # six were asked for, two are there
    fed.begin_block()
    next(batches)
    assert (fed.taken, fed.drained_share, fed._queued()[1]) == (1, 0.0, 5)  # one may be chance
    next(batches)
    assert (fed.taken, fed.drained_share, fed._queued()[1]) == (2, 0.5, 6)
    gate.set()
    until(lambda: fed._queued()[1] == 0)
    assert sum(1 for _batch in batches) == 22
    assert (fed.taken, fed.drained_share, fed._queued()[1]) == (24, 0.0, 0)
