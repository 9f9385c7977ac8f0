"""Configs of a run that are compiled beside it, and that its script finds compiled."""

from __future__ import annotations

import json
import os
import pickle
import random
import runpy
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from advisor.cache.config import Config
from advisor.piloting import INJECTED
from advisor.tuners import host
from advisor.tuners.act.in_force import IN_FORCE
from advisor.tuners.act.pilot import handing
from advisor.tuners.act.pilot.crew import LEAST_STEPS
from advisor.tuners.act.pilot.handing import CALLS, PLACE, trains_guarded
from advisor.tuners.act.pilot.orders import Lap, Order
from advisor.tuners.act.pilot.pilot import Pilot
from advisor.tuners.act.pilot.seen import Seen
from advisor.tuners.act.pilot.variables import SECRET
from advisor.tuners.measure.run.ahead import NOT_AHEAD, HandedAhead
from advisor.tuners.measure.run.run import Run
from advisor.tuners.measure.worker.wire import Job
from tests.runs.forked import left_behind, space_of

NET = """
import sys
from dataclasses import dataclass
import torch
from torch import Tensor, nn

@dataclass
class Output:
    loss: Tensor
    logits: Tensor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, *, x, labels):
        logits = self.last(nn.functional.gelu(self.first(x) * DRAWN).mean((2, 3)))
        return Output(nn.functional.cross_entropy(logits, labels), logits)
"""
TRAINING = """
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10**7):
        optimizer.zero_grad()
        model(x=torch.randn(4, 3, 8, 8), labels=torch.randint(2, (4,))).loss.backward()
        optimizer.step()
        if "torch._inductor" in sys.modules:
            from torch._dynamo.utils import counters
            counts = [counters["inductor"][f"fxgraph_cache_{how}"] for how in ("hit", "miss")]
            counts.append(counters["aot_autograd"]["autograd_cache_hit"])
            open("counts", "w").write(str(counts))
"""
GUARDED = NET + 'if __name__ == "__main__":' + TRAINING


class Said:
    """What is told of builds."""

    def __init__(self) -> None:
        self.left: list[list[Config]] = []
        self.notices: list[str] = []

    def tell(self, left: Sequence[Config], seconds: float) -> None:
        assert seconds >= 0
        self.left.append(list(left))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "cores", lambda: 4)
    before = set(host.family(os.getpid()))
    words = (sys.executable, "script.py")
    with Run(words, injected=INJECTED, log=Path("log"), deadline_s=60) as run:
        yield run
    assert set(host.family(os.getpid())) == before


def written(source: str) -> None:
    # In no cache on disk yet.
    drawn = str(random.SystemRandom().random())
    Path("script.py").write_text(source.replace("DRAWN", drawn))


def job_of(run: Run) -> Job:
    seen = run.describe()
    run.own = space_of(seen).default
    return Job(task=seen.task(("python", "script.py"), {}), device=seen.device, seed=0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling on a CPU needs g++")
def test_a_script_finds_what_was_built_beside_it_compiled(run: Run) -> None:
    """In each memory format for what it is: of strides that vary it would be other code."""
    written(GUARDED)
    job, said = job_of(run), Said()
    one = run.own.replace(compile="default")
    other = one.replace(channels_last=True)
    with HandedAhead.beside(run, job, said.notices.append, said.tell) as ahead:
        assert ahead.room(0) == 2
        folder = Path(ahead.folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / CALLS).stat().st_size < 2**14, "no weights are written"
        built = ahead.build([one, other], room=2, deadline_s=200.0)
    assert not folder.exists()
    assert {config: made.measurement.outcome for config, made in built.items()} == {
        one: "ok",
        other: "ok",
    }
    assert said.left[0] == [one, other] and not said.notices
    for config in (one, other):
        assert run.measure(config, seconds=0.05).ok
    hits, misses, autograd = json.loads(Path("counts").read_text())
    assert (hits, misses, autograd) == (4, 0, 2), "forward and backward of each"


def test_what_cannot_be_handed_over_goes_on_as_before(run: Run) -> None:
    written(NET + "if True:" + TRAINING)
    job, said = job_of(run), Said()
    with HandedAhead.beside(run, job, said.notices.append, said.tell) as ahead:
        assert ahead.room(0) == 1 and ahead.room(0) == 1
        assert ahead.build([run.own], room=1, deadline_s=60.0) == {}
    [notice] = said.notices
    assert notice.startswith(NOT_AHEAD) and 'train under if __name__ == "__main__"' in notice
    assert run.measure(run.own, seconds=0.05).ok


def test_a_process_that_cannot_make_the_calls_says_nothing_of_a_config(run: Run) -> None:
    written('if __name__ != "__main__":\n    raise OSError("the port is taken")\n' + GUARDED)
    job, said = job_of(run), Said()
    with HandedAhead.beside(run, job, said.notices.append, said.tell) as ahead:
        assert ahead.room(0) == 2
        assert ahead.build([run.own], room=1, deadline_s=60.0) == {}
        assert ahead.room(0) == 1
    assert len(said.notices) == 1 and "the port is taken" in said.notices[0]
    assert run.measure(run.own, seconds=0.05).ok


@pytest.mark.parametrize(
    ("source", "guarded"),
    [
        ("if __name__ == '__main__':\n    look()", True),
        ("def main():\n    look()\nif '__main__' == __name__:\n    pass\n    main()", True),
        ("look()", False),
        ("if __name__ == '__main__':\n    pass\nlook()", False),
        ("if __name__ != '__main__':\n    pass\nelse:\n    look()", False),
        ("if __name__ == '__main__':\n    pass\nelse:\n    pass\nif True:\n    look()", False),
    ],
)
def test_whether_importing_a_script_would_train(source: str, guarded: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    seen: list[bool] = []
    look = lambda: seen.append(trains_guarded(sys.modules["__main__"]))  # noqa: E731
    runpy.run_path(str(script), {"look": look}, run_name="__main__")
    assert seen == [guarded]


class Hands:
    """A guide that has one step's calls handed over, then leaves the script as it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lap: Lap | None = None

    def takes_over(self) -> bool:
        return True

    def begin(self, seen: Seen) -> Order:
        self._own = own = space_of(seen).default
        return Order(config=own, own=own, steps=1, hands=str(self._folder))

    def next(self, lap: Lap) -> Order:
        self.lap = lap
        return Order(config=self._own)

    def failed(self, exc: BaseException) -> None:
        raise AssertionError("the script failed") from exc


class Tied(nn.Module):
    """Called with indices and a weight for each, it gives back what is like its first layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(10, 64), nn.Linear(64, 10, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        return self.last(self.first(tokens) * weights.unsqueeze(2)) * self.scale


def trained(model: nn.Module, guide: Hands, *, idle: int = -1) -> Lap:
    """A script's steps, of two micro-batches like one another and one of weights that train; in
    an `idle` one its model is not called."""
    IN_FORCE.release()  # what tests of other files have left
    pilot = Pilot(guide)  # type: ignore[arg-type] # it never fails
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(10).repeat(2**16).view(-1, 5)
    for step in range(8):
        for wanting in (False, False, True) if step != idle else ():
            weights = torch.ones(4, 5, requires_grad=wanting)
            with torch.autocast("cpu", torch.bfloat16):
                found = model(data[:4], weights)
            found.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    pilot.release()
    assert left_behind() == []
    assert guide.lap is not None
    return guide.lap


def test_what_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "00")
    lap = trained(Tied(), Hands(tmp_path))
    assert (lap.outcome, lap.reason) == ("ok", "")
    data = (tmp_path / CALLS).read_bytes()
    assert len(data) < 2**14, "of a view no more than itself"
    handed = pickle.loads(data)
    [model] = handed.models
    assert model.first.weight is model.last.weight and model.first.weight.requires_grad
    assert model.scale == 2.0, "what is no parameter may decide what a call does"
    assert [call.kwargs for call in handed.calls] == [{}, {}], "none that is like another"
    for call, wanting in zip(handed.calls, (False, True), strict=True):
        tokens, weights = call.args
        assert tokens.equal(torch.arange(10).repeat(2).view(4, 5))
        assert weights.requires_grad is wanting
        assert call.autocast == torch.bfloat16
    theirs = json.loads((tmp_path / PLACE).read_text())["environment"]
    assert SECRET not in theirs and theirs["ADVISOR_DISABLE"] == "1", "no pilot comes into it"


def test_what_cannot_be_pickled_is_too_large_or_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Tied()
    model.held = lambda: None  # type: ignore[assignment]
    lap = trained(model, Hands(tmp_path))
    assert lap.outcome == "failed" and "lambda" in lap.reason
    monkeypatch.setattr(handing, "MOST_BYTES", 2**10)
    lap = trained(Tied(), Hands(tmp_path))
    assert lap.outcome == "failed" and "too much data" in lap.reason
    lap = trained(Tied(), Hands(tmp_path), idle=LEAST_STEPS)
    assert lap.outcome == "failed" and "no model that trains was called" in lap.reason


def test_one_of_several_processes_hands_nothing_over(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        lap = trained(Tied(), Hands(tmp_path))
    finally:
        torch.distributed.destroy_process_group()
    assert lap.outcome == "failed" and "torch.distributed" in lap.reason
