"""When steps have settled, by a clock of its own; a measured table that is played back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.cache.config import Config
from advisor.errors import UsageError
from advisor.tuners.measure.place import ConfigFailed
from advisor.tuners.measure.replay import ReplayPlace
from advisor.tuners.measure.timing import WARM_STEPS, warm_up


class FakeClock:
    """Time moves only when a step runs; a device may work on behind the host."""

    def __init__(self) -> None:
        self.time = self.device = 0.0

    def queue(self, seconds: float) -> None:
        self.device = max(self.device, self.time) + seconds

    def synchronize(self) -> None:
        self.time = max(self.time, self.device)

    def now(self) -> float:
        return self.time

    def mark(self) -> object:
        return None

    def between(self, start: object, end: object) -> float:
        return 0.0


def paying(clock: FakeClock, *costs: float) -> tuple[Callable[[], None], list[float]]:
    """A step with these costs, then 0.02 s each; what the steps so far took."""
    left, took = list(costs), []

    def step() -> None:
        took.append(left.pop(0) if left else 0.02)
        clock.queue(took[-1])

    return step, took


def test_warm_up_outlasts_an_algorithm_search() -> None:
    clock = FakeClock()
    step, took = paying(clock, 20.0, 0.3, 0.1)
    warm_up(step, clock, step)
    assert took == [20.0, 0.3, 0.1, *[0.02] * WARM_STEPS]


def test_what_comes_before_the_first_step_is_waited_for() -> None:
    clock = FakeClock()
    step, took = paying(clock)
    warm_up(step, clock, lambda: clock.queue(7.0))
    assert clock.time == pytest.approx(7.0 + sum(took)) and len(took) == WARM_STEPS


def test_warm_up_of_steps_that_never_settle_ends() -> None:
    clock, draw = FakeClock(), random.Random(0)

    def step() -> None:
        clock.queue(draw.uniform(0.05, 0.5))

    warm_up(step, clock, step)
    assert clock.time < 3.0


DEFAULT = Config(precision="default", batch_size=64)
BF16, FP16 = DEFAULT.replace(precision="bf16"), DEFAULT.replace(precision="fp16")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = [
        {"config": dict(DEFAULT), "samples_per_s": 640.0, "first_step_s": 1.0, "peak_bytes": 5},
        {"config": dict(BF16), "samples_per_s": 1280.0, "first_step_s": 3.0, "gpu_ms": 40.0},
        {"config": dict(BF16), "samples_per_s": 9999.0},
        {"config": dict(FP16), "ok": False},
    ]
    path = tmp_path / "table.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_table_is_played_back_by_a_clock_of_its_own(table: Path) -> None:
    place = ReplayPlace(table, noise=0.0)
    assert place.baseline == DEFAULT and place.configs() == [DEFAULT, BF16, FP16]
    first = place.block(DEFAULT, 10, warm=2, deadline_s=60)
    assert (first.steps, first.samples, first.peak_bytes) == (10, 640, 5)
    assert (first.first_s, first.seconds) == pytest.approx((1.2, 1.0))
    assert place.now() == pytest.approx(2.2)
    again = place.block(DEFAULT, 10, deadline_s=60)
    assert again.first_s == 0.0 and place.now() == pytest.approx(2.2 + 1.1)
    other = place.block(BF16, 10, deadline_s=60)
    assert (other.first_s, other.seconds, other.gpu_s) == pytest.approx((3.05, 0.5, 0.4))
    assert place.block(DEFAULT, 1, deadline_s=60).first_s == pytest.approx(0.1), "it is kept"
    before = place.now()
    assert place.compare(BF16, deadline_s=60).ok and place.now() > before
    place.forget(BF16)
    assert place.block(BF16, 1, deadline_s=60).first_s > 3.0
    assert place.visited == [DEFAULT, DEFAULT, BF16, DEFAULT, BF16]


def test_noise_is_the_same_with_the_same_seed(table: Path) -> None:
    def seconds(seed: int) -> list[float]:
        place = ReplayPlace(table, seed=seed)
        return [place.block(BF16, 5, deadline_s=60).seconds for _ in range(5)]

    assert seconds(1) == seconds(1) != seconds(2)
    assert len(set(seconds(1))) == 5


def test_what_failed_fails_again_and_nothing_outlasts_its_deadline(table: Path) -> None:
    place = ReplayPlace(table)
    with pytest.raises(ConfigFailed) as failed:
        place.block(FP16, 1, deadline_s=60)
    assert failed.value.outcome == "out_of_memory"
    with pytest.raises(ConfigFailed, match="not in the table"):
        place.block(DEFAULT.at(8), 1, deadline_s=60)
    with pytest.raises(ConfigFailed) as failed:
        place.block(BF16, 1, deadline_s=2.0)
    assert failed.value.outcome == "timed_out" and place.now() == 2.0


@pytest.mark.parametrize("text", ["", "{", '{"samples_per_s": 1}'])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(UsageError, match="cannot be replayed"):
        ReplayPlace(tmp_path / "bad.jsonl")
