"""Several devices at once: each held against itself, told as the first would have it."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.cache.task import Task
from advisor.errors import TargetFailed, WorkerError
from advisor.tuners.measure.worker import fleet as fleets
from advisor.tuners.measure.worker.fleet import Ask, Done, Fleet
from advisor.tuners.measure.worker.parent import Worker
from advisor.tuners.measure.worker.wire import Facts, Job
from advisor.tuners.search.journal import open_study
from advisor.tuners.search.plan import Clock
from advisor.tuners.search.study import Scope, Search
from tests.tuners.test_study import SPACE, Seen, Simulated

ANCHOR = Ask(config=Config(batch_size=1), seconds=1.0)
WAIT_S = 30.0


class Floor:
    """Where trials are counted that run at a time, over all devices."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now: dict[str, Config] = {}
        self.together: list[set[Config]] = []
        self.known: set[Config] = set()


class Device:
    """Takes `pace` times as long as its like; where its host is the limit, `slowed` times when it
    is measured first, beside others. Other configs are held until `met` run."""

    def __init__(self, floor: Floor, name: str, pace: float = 1.0) -> None:
        self.floor, self.name, self.pace = floor, name, pace
        self.measured: list[Config] = []
        self.met = threading.Barrier(1)
        self.host_bound: set[Config] = set()
        self.slowed = 1.5
        self.fails = ""
        self.ended = threading.Event()

    def describe(self) -> Facts:
        raise TargetFailed(f"{self.name} has no memory left")

    def interrupt(self) -> None:
        self.ended.set()

    def release(self) -> None:
        pass

    def measure(self, config: Config, **_how: object) -> Measurement:
        with self.floor.lock:
            self.floor.now[self.name] = config
            self.floor.together.append(set(self.floor.now.values()))
        try:
            return self._measured(config)
        finally:
            with self.floor.lock:
                del self.floor.now[self.name]

    def _measured(self, config: Config) -> Measurement:
        self.measured.append(config)
        if config == ANCHOR.config:
            return self._took(0.01, config)
        if self.fails:
            raise WorkerError(self.fails)
        if config.batch == 99:
            assert self.ended.wait(WAIT_S)
            return Measurement(outcome="crashed", reason="interrupted")
        if config not in self.host_bound:
            self.met.wait(WAIT_S)
        return self._took(config.batch / 100, config)

    def _took(self, seconds: float, config: Config) -> Measurement:
        host = config in self.host_bound
        first = config not in self.floor.known
        self.floor.known.add(config)
        step_s = seconds * self.pace * (self.slowed if host and first else 1.0)
        rate = 1 / step_s
        return Measurement(
            outcome="ok",
            samples_per_s=rate,
            low=rate,
            high=rate,
            step_s=step_s,
            busy=0.5 if host else 1.0,
            blocks=(step_s, step_s),
        )


@pytest.fixture
def two() -> tuple[Device, Device]:
    floor = Floor()
    return Device(floor, "cuda:0"), Device(floor, "cuda:1", pace=1.1)


def asked(*batches: int) -> list[Ask]:
    return [Ask(config=Config(batch_size=n), seconds=1.0) for n in batches]


def run(devices: tuple[Device, ...], asks: list[Ask], seen: Seen | None = None) -> list[Done]:
    notice = (seen or Seen()).notice
    with Fleet({one.name: one for one in devices}, notice) as fleet:
        return list(fleet.each(asks, ANCHOR))


def test_trials_run_at_once_and_are_told_as_the_first_device_has_them(
    two: tuple[Device, Device],
) -> None:
    barrier = threading.Barrier(2)
    for one in two:
        one.met = barrier
    found = run(two, asked(2, 3, 4, 5))
    for done in found:
        step_s = done.config.batch / 100
        assert done.measured.step_s == pytest.approx(step_s)
        assert done.measured.samples_per_s == pytest.approx(1 / step_s)
        assert done.measured.blocks == pytest.approx((step_s, step_s))
        assert done.beside == 2
    assert sorted(done.config.batch for done in found) == [2, 3, 4, 5]
    assert len(two[0].measured) == len(two[1].measured) == 3  # the anchor, and two


def test_what_the_host_is_the_limit_of_is_measured_again_alone(
    two: tuple[Device, Device],
) -> None:
    asks = asked(2, 3, 4, 5)
    for one in two:
        one.host_bound = {ask.config for ask in asks}
    found = run(two, asks)
    assert sorted(done.config.batch for done in found) == [2, 3, 4, 5]
    for done in found:
        assert done.beside == 1 and done.measured.step_s == pytest.approx(done.config.batch / 100)
        assert two[0].floor.together.count({done.config}) >= 1
    assert sum(len(one.measured) for one in two) == 2 * (1 + len(asks))


def test_neighbours_that_slow_nothing_down_are_let_run(two: tuple[Device, Device]) -> None:
    asks = asked(*range(2, 10))
    for one in two:
        one.host_bound, one.slowed = {ask.config for ask in asks}, 1.0
    found = run(two, asks)
    assert sorted(done.config.batch for done in found) == list(range(2, 10))
    again = sum(len(one.measured) for one in two) - 2 - len(asks)
    assert again == fleets.ENOUGH
    assert [done.beside for done in found] == [1] * again + [2] * (len(asks) - again)


def test_what_devices_are_held_against_one_another_by_tells_of_neighbours_too(
    two: tuple[Device, Device],
) -> None:
    asks = asked(2, 3, 4)
    for one in two:
        one.host_bound, one.slowed = {ask.config for ask in (ANCHOR, *asks)}, 1.0
    assert len(run(two, asks)) == 3
    assert sum(len(one.measured) for one in two) == 2 * 2 + len(asks)


def test_what_devices_are_held_against_one_another_by_is_measured_once(
    two: tuple[Device, Device],
) -> None:
    found = run(two, [ANCHOR, *asked(2, 3)])
    assert found[0].config == ANCHOR.config
    assert sorted(done.config.batch for done in found) == [1, 2, 3]
    assert all(one.measured.count(ANCHOR.config) == 1 for one in two)


def test_what_is_slow_enough_beside_others_is_not_measured_again(
    two: tuple[Device, Device],
) -> None:
    configs = {Config(batch_size=n) for n in (50, 51)}
    for one in two:
        one.host_bound = configs
    asks = [Ask(config=config, seconds=1.0, worth=5.0) for config in configs]
    assert {done.config for done in run(two, asks)} == configs
    assert sum(len(one.measured) for one in two) == 4


@pytest.mark.parametrize(("pace", "why"), [(1.5, "0.67x as fast as cuda:0"), (1.0, "it is gone")])
def test_a_device_that_is_not_as_the_others_is_left_out(
    two: tuple[Device, Device], pace: float, why: str
) -> None:
    first, second = two
    second.pace, second.fails = pace, "it is gone"
    seen = Seen()
    found = run(two, asked(2, 3, 4), seen)
    assert sorted(done.config.batch for done in found) == [2, 3, 4]
    assert seen.notices == [f"cuda:1 is left out: {why}"]
    assert len(first.measured) == 4


def test_the_first_device_cannot_be_left_out(two: tuple[Device, Device]) -> None:
    two[0].fails = "it is gone"
    with pytest.raises(WorkerError, match="it is gone"):
        run(two, asked(2, 3))


def test_what_cannot_be_described_on_the_first_device_is_an_error(
    two: tuple[Device, Device],
) -> None:
    with (
        Fleet({one.name: one for one in two}) as fleet,
        pytest.raises(TargetFailed, match="cuda:0 has no memory"),
    ):
        fleet.describe()


def test_who_stops_listening_ends_what_runs(two: tuple[Device, Device]) -> None:
    with Fleet({one.name: one for one in two}) as fleet:
        found = fleet.each(asked(99, 2, 3), ANCHOR)
        next(found)
        assert "cuda:0" in two[0].floor.now
        found.close()  # type: ignore[attr-defined]
        assert two[0].floor.now == {}


class Twice(Simulated):
    """One of several that are alike; the host is not the limit."""

    def describe(self) -> Facts:
        raise NotImplementedError

    def interrupt(self) -> None:
        pass

    def measure(self, config: Config, **how: object) -> Measurement:
        measured = super().measure(config, **how)
        return dataclasses.replace(measured, busy=1.0)


def test_a_search_over_two_finds_what_one_finds_and_measures_nothing_twice(
    tmp_path: Path,
) -> None:
    devices = {"cuda:0": Twice(), "cuda:1": Twice()}
    seen = Seen()
    study, _ = open_study(tmp_path, "two")
    with Fleet(devices) as fleet:
        first = devices["cuda:0"]
        scope = Scope(clock=Clock(1e6))
        search = Search(first, SPACE, study, scope, seen, fleet)
        search.run()
    plain, _ = open_study(tmp_path, "one")
    alone = Search(Twice(), SPACE, plain, scope)
    alone.run()
    assert search.best().config == alone.best().config
    tried = [trial.config for trial in search.trials]
    assert len(tried) == len(set(tried)) and len(seen.trials) == len(tried)
    both = [config for one in devices.values() for config in one.measured]
    assert len(both) == len(tried) + 1  # the default: on both, as the anchor
    assert all(len(one.measured) > len(tried) / 4 for one in devices.values())
    # A search that goes on counts the time that passed, not that of each device.
    spent = sum(trial.seconds for trial in search.trials)
    again = Search(first, SPACE, study, Scope(clock=Clock(1e9)))
    assert 0 < again.clock.spent_s < spent


def test_a_climb_is_as_many_ahead_as_there_are_devices(tmp_path: Path) -> None:
    first, second = Twice(), Twice()
    study, _ = open_study(tmp_path, "two")
    with Fleet({"cuda:0": first, "cuda:1": second}) as fleet:
        search = Search(first, SPACE, study, Scope(clock=Clock(1e6)), fleet=fleet)
        search._try(SPACE.default, "default", always=True)
        climb = search._climb(SPACE.default, [128, 256, 512])
        tried = next(climb)
    assert tried is not None and tried.config.batch == 128
    assert {one.batch for one in first.measured + second.measured} == {64, 128, 256}


SLEEPY = """
import os
import time
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        Path(__file__).with_name("sees " + os.environ.get("CUDA_VISIBLE_DEVICES", "all")).touch()

    def forward(self, x):
        if len(x) == 6:
            Path(__file__).with_name("asleep").touch()
            time.sleep(1000)
        return self.linear(x)
"""


def test_two_real_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "UNLIKE", 1e9)  # they share the cores of one host
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    task = Task.of(str(tmp_path / "sleepy.py"), {"shape": [(4, 3)]})
    job = Job(task=task, device="cpu", seed=0)
    other = dataclasses.replace(job, visible="GPU-1,GPU-0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    four, eight, hangs = (
        Config(precision="default", cudnn_deterministic=False, batch_size=n, threads=1)
        for n in (4, 8, 6)
    )
    with (
        Worker(job, deadline_s=60) as first,
        Worker(other, deadline_s=60) as second,
        Fleet({"first": first, "second": second}) as fleet,
    ):
        described = fleet.describe()
        assert described["first"].model == described["second"].model
        assert {file.name for file in tmp_path.glob("sees *")} == {"sees all", "sees GPU-1,GPU-0"}
        asks = [Ask(config=config, seconds=0.05, deadline_s=60) for config in (four, eight)]
        found = {done.config: done.measured for done in fleet.each(asks, asks[0])}
        assert all(found[config].ok and found[config].host_bound for config in (four, eight))
        running = fleet.begin(fleet.lanes[0], lambda: first.measure(hangs, seconds=0.05))
        until = time.monotonic() + WAIT_S
        while not (tmp_path / "asleep").exists() and time.monotonic() < until:
            time.sleep(0.01)
        fleet.end()
        assert running.result().outcome == "crashed"
        assert first.measure(four, seconds=0.05).ok
