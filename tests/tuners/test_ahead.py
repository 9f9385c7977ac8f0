"""Configs built at once, each in a process of its own, and found compiled by the worker."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.tuners import host
from advisor.tuners.measure.runner import Built
from advisor.tuners.measure.worker.ahead import (
    CONTEXT_BYTES,
    HOST_BYTES,
    LATE,
    LATE_LEAST_S,
    LONGER,
    Ahead,
    _patience_s,
)
from advisor.tuners.measure.worker.parent import Worker
from advisor.tuners.measure.worker.wire import Job
from tests.tuners.test_worker import MEAN, config, ended, job

COUNTED = """
import sys
from pathlib import Path
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.GELU())

    def forward(self, x):
        return super().forward(x) * DRAWN

def loss(output, target):
    if "torch._inductor" in sys.modules:
        from torch._dynamo.utils import counters
        counts = (counters["inductor"][f"fxgraph_cache_{how}"] for how in ("hit", "miss"))
        Path(__file__).with_name("counts").write_text(" ".join(map(str, counts)))
    return output.square().mean()
"""


class Heard:
    """What is told of builds."""

    def __init__(self) -> None:
        self.left: list[list[Config]] = []

    def tell(self, left: Sequence[Config], seconds: float) -> None:
        assert seconds >= 0
        self.left.append(list(left))


def test_what_crashes_or_hangs_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "mean.py"
    path.write_text(MEAN)
    heard = Heard()
    with Worker(job(path), deadline_s=60) as worker:
        ahead = Ahead(job(path), worker, tell=heard.tell)
        good, dies, raises = configs = [config(n) for n in (4, 3, 11)]
        built = ahead.build(configs, room=3, deadline_s=60.0)
        hangs = ahead.build([config(6)], room=1, deadline_s=1.0)[config(6)]
    outcomes = {one: built[one].measurement.outcome for one in configs}
    assert outcomes == {good: "ok", dies: "crashed", raises: "failed"}
    assert built[good].measurement.first_step_s > 0
    assert "exit code 7" in built[dies].measurement.reason
    assert 0 < built[good].seconds < 60
    assert (hangs.measurement.outcome, hangs.seconds) == ("timed_out", 1.0)
    # What is not done yet is told.
    assert heard.left[0] == configs and heard.left[-1] == [config(6)]


def test_an_interruption_ends_what_is_being_built(tmp_path: Path) -> None:
    path = tmp_path / "mean.py"
    path.write_text(MEAN)
    started: list[int] = []
    before = set(host.family(os.getpid()))

    def interrupt(_left: Sequence[Config], seconds: float) -> None:
        started[:] = set(host.family(os.getpid())) - before
        if len(started) >= 4:  # two, and the guard of each
            raise KeyboardInterrupt

    with Worker(job(path), deadline_s=60) as worker, pytest.raises(KeyboardInterrupt):
        ahead = Ahead(job(path), worker, tell=interrupt)
        ahead.build([config(6), config(4)], room=2, deadline_s=60.0)
    assert all(ended(process, 0.5) for process in started)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling on a CPU needs g++")
def test_a_worker_finds_what_was_built_compiled(
    tmp_path: Path,
) -> None:
    path = tmp_path / "counted.py"
    # In no cache on disk yet.
    path.write_text(COUNTED.replace("DRAWN", str(random.SystemRandom().random())))
    compiled = config(4).replace(compile="default")
    with Worker(job(path), deadline_s=200) as worker:
        ahead = Ahead(job(path), worker)
        built = ahead.build([compiled], room=1, deadline_s=200.0)[compiled]
        assert built.measurement.ok
        assert (tmp_path / "counts").read_text() == "0 2", "forward and backward"
        measured = worker.measure(compiled, seconds=0.05)
    assert measured.ok and (tmp_path / "counts").read_text() == "2 0"
    assert measured.first_step_s < built.measurement.first_step_s


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling on a CPU needs g++")
def test_what_is_compiled_anew_to_be_compared_is_built_beside(
    tmp_path: Path,
) -> None:
    """With its draws fixed dropout is other code: on an H200 44 s were too few to compile it."""
    path = tmp_path / "counted.py"
    drawn = str(random.SystemRandom().random())
    path.write_text(COUNTED.replace("DRAWN", drawn).replace("nn.GELU()", "nn.Dropout(0.5)"))
    compiled = config(4).replace(compile="default")
    with Worker(job(path), deadline_s=200) as worker:
        assert worker.describe().draws
        ahead = Ahead(job(path), worker, compared=True)
        built = ahead.build([compiled], room=2, deadline_s=200.0)
        assert built[compiled].measurement.ok
        verified = worker.verify(compiled, against=config(4), steps=8, tolerance=0.02)
    assert verified.ok, verified.reason
    hit, miss = map(int, (tmp_path / "counts").read_text().split())
    assert hit >= 4 and miss == 0


def test_what_takes_far_longer_than_the_others_is_given_up() -> None:
    ok, failed = Measurement(outcome="ok"), Measurement(outcome="failed")
    took = {
        config(n): Built(measurement=ok if n < 5 else failed, seconds=s)
        for n, s in ((1, 20.0), (2, 26.0), (5, 2.0))
    }
    assert _patience_s(took, 5) == math.inf, "what failed tells nothing"
    assert _patience_s(took, 4) == LATE * 26.0
    assert _patience_s(took, 3) == LONGER * 26.0, "for what is compared, all are built"
    assert _patience_s({config(1): Built(measurement=ok, seconds=3.0)}, 2) == LATE_LEAST_S


class Free(Worker):
    """A worker that has so many bytes of its device left."""

    def __init__(self, job: Job, free: int) -> None:
        super().__init__(job, deadline_s=1.0)
        self._free = free

    def free_bytes(self) -> int:
        return self._free


@pytest.mark.parametrize(
    ("cores", "host_gib", "free", "most"),
    [
        (16, 200, 60, 8),
        (16, 200, 20, 5),  # 3 GiB of steps and 1 of a context each
        (16, 13, 60, 2),
        (2, 200, 60, 1),
        (64, 500, 500, 8),
        (16, 200, 2, 1),
    ],
)
def test_as_many_at_once_as_cores_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch, cores: int, host_gib: int, free: int, most: int
) -> None:
    monkeypatch.setattr(host, "cores", lambda: cores)
    monkeypatch.setattr(host, "free_bytes", lambda: host_gib * 2**30)
    on_gpu = job(Path("model.py"), device="cuda:0")
    assert (HOST_BYTES, CONTEXT_BYTES) == (6 * 2**30, 2**30)
    with Free(on_gpu, free * 2**30) as worker:
        assert Ahead(on_gpu, worker).room(3 * 2**30) == most
    limited = job(Path("model.py"), device="cuda:0", max_memory=8 * 2**30)
    with Free(limited, free * 2**30) as worker:
        assert Ahead(limited, worker).room(3 * 2**30) <= 2
