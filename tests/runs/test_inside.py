"""A run that is tuned within itself: it trains on whatever the search, or a config, does."""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from advisor.cache.config import Config, Value
from advisor.command_snippets import tune_again
from advisor.errors import AdvisorWarning
from advisor.open_store import open_records
from advisor.resolve.online import OnlineTuner
from advisor.resolve.record_guide import RunPolicy
from advisor.tuners import host
from advisor.tuners.act.pilot.pilot import ANOTHER, UNORDERED, UNSEEN, ActivePilot
from advisor.tuners.act.pilot.protocol import (
    BlockRequest,
    BlockResult,
    PilotClient,
    startup_failure,
)
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.decisions import MAX_OBSERVED_STEPS
from advisor.tuners.measure.run.recorded_steps import RecordedSteps
from advisor.tuners.measure.run.run import AttachedRun
from advisor.tuners.measure.run.session import AttachedScript
from advisor.tuners.search.plan import suffices
from tests import forks
from tests.runs.forked import left_behind, space_of

SCRIPT = """
import gc, sys, time
from pathlib import Path

gc.disable()  # what is imported is no garbage: looking through it is a quarter of a start

import advisor

enough = Path("enough")
tune = sys.argv[2] if len(sys.argv) > 2 else None
advice = advisor.apply(tune=tune, permit=advisor.Permit(compile=False))

import torch
from torch import nn

net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
optimizer = torch.optim.AdamW(net.parameters())
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until and not (enough.exists() or "in force" in advice.report()):
    loss = net(torch.randn(8, 3, 8, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(advice.report())
print("loss", loss.item())
"""
WAIT_S = 60.0
RUN = (sys.executable, "-m", "advisor", "run")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def begun(script: Path, *words: str, by: Sequence[str] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*by, "python", script.name, *words],
        cwd=script.parent,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def conductor_of(process: subprocess.Popen[str]) -> int:
    """The process that searches for a script, once there is one."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if b"advisor.online_search" in words and int(parent) == process.pid:
                return int(entry.name)
        time.sleep(0.1)
    raise AssertionError("no search was begun")


def ends(pid: int) -> bool:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.e2e
def test_it_goes_on_with_the_best_and_the_record_is_kept(script: Path) -> None:
    process = begun(script, "60", by=[*RUN, "--tune", "5s", "--"])
    out, err = process.communicate()
    assert process.returncode == 0, err
    begins, said = err.splitlines()
    assert begins == "advisor: tune: tries configs for 5 s; every step trains"
    assert out.splitlines()[0] == said.removeprefix("advisor: ")
    assert said.startswith("advisor: in force: ") and "; found in this run: " in said
    (record,) = open_records(None).all()
    assert record.target.name == "python train.py 60"
    assert record.trials[0].config == record.baseline.config
    assert record.provenance.how == "within its own run"
    assert tune_again(record) == "advisor tune -- python train.py 60"
    assert not suffices(record.provenance.effort, "quick")


PARALLEL = """
import gc, os

gc.disable()  # what is imported is no garbage: looking through it is a quarter of a start

import advisor

advice = advisor.apply(tune="6s", permit=advisor.Permit(compile=False))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(net.parameters())
went = torch.zeros(1)
while not went:
    loss = net(torch.randn(8, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    went.fill_("in force" in advice.report())
    dist.all_reduce(went)
with open(f"said-{dist.get_rank()}", "w") as said:
    said.write(advice.report())
dist.barrier()
os._exit(0)  # gloo's own end is now and then one by SIGABRT
"""


@pytest.mark.e2e
def test_every_process_goes_on_alike(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PARALLEL)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--standalone", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert "found in this run" in said[0]
    (record,) = open_records(None).all()
    assert record.key.task.processes == 2


@pytest.mark.e2e
def test_a_script_that_ends_before_its_tuning_says_so_and_ends_the_search(script: Path) -> None:
    process = begun(script, "60", by=[*RUN, "--tune", "5m", "--"])
    conductor = conductor_of(process)
    script.with_name("enough").touch()
    _begins, said = process.communicate()[1].splitlines()
    assert re.fullmatch(
        r"advisor: tune: the script ended \d+ s into the 300 s of its tuning, and is not tuned "
        "yet; the next run goes on from there",
        said,
    )
    assert ends(conductor)


def test_a_script_that_ends_before_its_tuning_begins_says_so(script: Path) -> None:
    script.write_text(SCRIPT.replace("while time", "for _ in '123':  # while time"))
    done = forks.run(script, "1", "5m", cwd=script.parent)
    assert done.stderr == (
        "advisor: tune: the script ended after 3 steps of its optimizers, before anything could be "
        "tried; a longer run is tuned\n"
    )


def test_the_script_goes_on_without_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, charge: ActivePilot
) -> None:
    """As where something kills the process that searches."""

    def killed(listening: socket.socket) -> None:
        listening.accept()[0].close()

    monkeypatch.setattr(OnlineTuner, "_shared_folder", lambda *_: str(tmp_path))
    net = Net()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "pilot"))
        listening.listen(1)
        threading.Thread(target=killed, args=[listening]).start()
        charge.attach(OnlineTuner(["python", "train.py"], RunPolicy(), tune_s=300.0))
        with pytest.warns(AdvisorWarning, match="the search within this run has ended") as said:
            train(net, 12)
    assert len(said) == 1
    assert net.dtypes == [torch.float32] * 12


def test_a_search_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "pilot"))
        silent.listen(1)
        line = PilotClient(str(tmp_path / "pilot"), None, patience_s=0.2)
        net, charge = Net(), ActivePilot()
        charge.attach(line)
        train(net, 8)
    assert left_behind() == []
    assert set(net.dtypes) == {torch.float32}


def test_a_config_is_held_against_fp32_within_the_run(tmp_path: Path) -> None:
    """Over the line that a run and the process that searches have; the run stays what it was."""
    data, charge, found = torch.randn(40, 4, 6), ActivePilot(), []

    def search(listening: socket.socket) -> None:
        inside = AttachedRun(
            AttachedScript(listening), ["python", "train.py"], log=tmp_path / "log"
        )
        inside.baseline = space_of(inside.describe()).default
        inside.tolerance = 0.02
        half = inside.baseline.replace(precision="bf16")
        found.append(inside.compare(half, deadline_s=60))
        inside.leave(inside.baseline, "")

    torch.manual_seed(0)
    net, alone = nn.Linear(6, 4), nn.Linear(6, 4)
    alone.load_state_dict(net.state_dict())
    train(alone, data)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "pilot"))
        listening.listen(1)
        searching = threading.Thread(target=search, args=[listening])
        searching.start()
        line = PilotClient(str(tmp_path / "pilot"), None, patience_s=WAIT_S)
        charge.attach(line, RecordedSteps(careful=True))
        train(net, data)
        searching.join(WAIT_S)
    charge.release()
    (compared,) = found
    assert compared.ok, compared
    assert all(map(torch.equal, net.state_dict().values(), alone.state_dict().values()))


class Net(nn.Module):
    """Raises in bf16 where it is to; keeps the number formats that it was called in."""

    def __init__(self, raises: type[Exception] | None = None, *, backward: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.raises, self.backward = raises, backward
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if self.raises is not None and out.dtype == torch.bfloat16:
            if not self.backward:
                self.fail(x)
            out.register_hook(self.fail)
        self.dtypes.append(out.dtype)
        return out

    def fail(self, _at: Tensor) -> None:
        assert self.raises is not None
        raise self.raises("not in bf16")


def train(net: nn.Module, data: int | Iterable[Tensor]) -> None:
    """On batches, or so many."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in data if isinstance(data, Iterable) else torch.randn(data, 4, 6):
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Careful:
    """A guide that tries something, bf16, for three steps, then goes on as the script is."""

    needs_room = False

    def __init__(self, **there: Value) -> None:
        self.there = there or {"precision": "bf16"}
        self.results: list[BlockResult] = []

    def takes_over(self) -> bool:
        return True

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        self.seen, self.own = seen, space_of(seen).default
        there = self.own.replace(**self.there)
        room = self.needs_room
        return BlockRequest(config=there, steps=3, own=self.own, needs_room=room)

    def next(self, result: BlockResult) -> BlockRequest:
        self.results.append(result)
        return BlockRequest(config=self.own, steps=2 if len(self.results) == 1 else 0)

    def failed(self, exc: BaseException) -> None:
        raise AssertionError from exc

    def backward_failed(self, exc: Exception, order: BlockRequest) -> None:
        exc.add_note(str(order.config["precision"]))


@pytest.fixture
def charge() -> Iterator[ActivePilot]:
    charge = ActivePilot()
    yield charge
    charge.release()
    assert left_behind() == []


@pytest.mark.parametrize(
    ("raises", "outcome"), [(RuntimeError, "failed"), (MemoryError, "out_of_memory")]
)
def test_a_config_that_raises_costs_its_step(
    charge: ActivePilot, raises: type[Exception], outcome: str
) -> None:
    guide, net = Careful(), Net(raises)
    charge.attach(guide)
    train(net, 12)
    failed, later = guide.results
    assert (failed.steps, failed.outcome) == (1, outcome)
    assert failed.reason == f"{raises.__name__}: not in bf16"
    assert (later.steps, later.outcome) == (2, "ok")
    assert net.dtypes == [torch.float32] * 12


class Samples(Dataset[Tensor]):
    """Notes which of them this process has fetched."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 48

    def __getitem__(self, number: int) -> Tensor:
        if get_worker_info() is not None and number == self.bad:
            raise RuntimeError("not in a worker")
        self.fetched.append(number)
        return torch.full((6,), float(number))


@pytest.mark.parametrize(("bad", "outcome"), [(-1, "ok"), (20, "failed")])
def test_workers_feed_a_config_and_cost_their_lap_alone(
    charge: ActivePilot, monkeypatch: pytest.MonkeyPatch, bad: int, outcome: str
) -> None:
    monkeypatch.setattr(host, "files_read", list)  # pytest's own
    guide, data = Careful(num_workers=1), Samples(bad)
    charge.attach(guide)
    train(Net(), DataLoader(data, batch_size=4))
    assert [result.outcome for result in guide.results] == [outcome, "ok"]
    assert guide.results[0].reason.startswith("in a worker: ") == (outcome == "failed")
    # The first four batches came before the config, three with it, of these one before the bad one.
    ours = [*range(16), *range(28 if outcome == "ok" else 20, 48)]
    assert data.fetched == ours


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(48, 6))


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (
            lambda: DataLoader(Samples(), batch_size=4, num_workers=1),
            "your script already: 1 loader worker",
        ),
        (
            lambda: DataLoader(Stream(), batch_size=4),
            "not tuned: the loader: of an IterableDataset every worker would read all",
        ),
        (lambda: torch.randn(12, 4, 6), None),
    ],
)
def test_a_loader_that_stays_as_it_is(
    charge: ActivePilot, loader: Callable[[], Iterable[Tensor]], said: str | None
) -> None:
    guide = Careful()
    charge.attach(guide)
    train(Net(), loader())
    assert guide.seen.workers == 0
    assert "num_workers" not in guide.own
    assert "num_workers" in guide.seen.kept
    assert guide.seen.script == ""  # of the key it is no part
    assert guide.seen.lines()[:1] == ([said] if said else [])


def test_a_config_that_raises_in_backward_has_no_order_after_it_until_the_script_goes_on(
    charge: ActivePilot,
) -> None:
    guide, net = Careful(), Net(MemoryError, backward=True)
    charge.attach(guide)
    with pytest.raises(MemoryError) as caught:
        train(net, 12)
    assert caught.value.__notes__ == ["bf16"]
    assert not guide.results
    train(net, 8)
    assert guide.results[0].reason.startswith("MemoryError: not in bf16 (test_inside.py:")
    assert [one.outcome for one in guide.results] == ["out_of_memory", "ok"]


def test_the_search_within_a_run_hears_of_a_failure_before_the_script_may_end_of_it() -> None:
    class Answers:
        def __init__(self) -> None:
            self.results: list[BlockResult] = []

        def next(self, result: BlockResult) -> BlockRequest:
            self.results.append(result)
            return BlockRequest(config=own, own=own, steps=len(self.results))

    own = Config(precision="default")
    guide = OnlineTuner(["python", "train.py"], RunPolicy(), tune_s=9.0)
    guide._client = answers = Answers()  # type: ignore[assignment]
    guide.backward_failed(MemoryError("in backward"), BlockRequest(config=own, own=own, steps=3))
    assert [result.reason for result in answers.results] == ["MemoryError: in backward"]
    assert guide.next(BlockResult(outcome="out_of_memory")).steps == 1  # the answer that came then
    assert guide.next(BlockResult(steps=1)).steps == 2


def test_what_the_script_raises_itself_is_its_own(charge: ActivePilot) -> None:
    class Always(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if len(self.dtypes) > 8:
                raise ValueError("the script's")
            return out

    charge.attach(Careful())
    with pytest.raises(ValueError, match="the script's"):
        train(Always(), 12)


def test_without_room_a_config_is_not_tried(
    charge: ActivePilot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advisor.tuners.act.pilot.pilot.Pilot._has_room", lambda *_: False)
    guide, net = Careful(), Net()
    guide.needs_room = True
    charge.attach(guide)
    train(net, 12)
    assert guide.results[0].outcome == "out_of_memory"
    assert "little of the device's memory is free" in guide.results[0].reason
    assert set(net.dtypes) == {torch.float32}


class Alone(Careful):
    """A guide that times steps without end, and keeps why the pilot left."""

    def __init__(self) -> None:
        super().__init__()
        self.why: list[str] = []

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        self.own = space_of(seen).default
        return BlockRequest(config=self.own, steps=10**6, own=self.own)

    def failed(self, exc: BaseException) -> None:
        self.why.append(str(exc))


def without_a_module() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    for _ in range(8):
        optimizer.step()


def without_an_order() -> None:
    net = nn.Linear(6, 4)
    optimizers = [torch.optim.SGD(net.parameters()) for _ in range(3)]
    for step in range(MAX_OBSERVED_STEPS):
        net(torch.ones(2, 6)).sum().backward()
        optimizers[int(step**0.5) % 3].step()


def two_models_in_turn() -> None:
    train(nn.Linear(6, 4), 8)
    train(nn.Linear(6, 5), MAX_OBSERVED_STEPS)


@pytest.mark.parametrize(
    ("trains", "said"),
    [(without_a_module, UNSEEN), (without_an_order, UNORDERED), (two_models_in_turn, ANOTHER)],
)
def test_what_cannot_be_timed_is_left_alone_with_the_reason(
    charge: ActivePilot, trains: Callable[[], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of this process may have compiled something, which would be told here.
    monkeypatch.setattr("advisor.tuners.act.pilot.pilot.graphs_compiled", lambda: False)
    guide = Alone()
    charge.attach(guide)
    trains()
    assert guide.why == [said]
    nn.Linear(6, 4)(torch.ones(6))  # the last hook goes with the next call of any module


def test_what_a_process_failed_with_first_is_told_with_file_and_line(tmp_path: Path) -> None:
    """What torchrun says of it is a table; and a process where nobody listens goes on."""
    line = PilotClient(str(tmp_path / "pilot"), None)
    (tmp_path / "train.py").write_text("def load():\n    raise ValueError('bad data')\n\nload()\n")
    with pytest.raises(ValueError, match="bad data") as caught:
        runpy.run_path(str(tmp_path / "train.py"))
    line.failed(caught.value)
    line.failed(RuntimeError("a child failed"))
    assert startup_failure(str(tmp_path / "pilot")) == "ValueError: bad data (train.py:2)"
    charge = ActivePilot()
    charge.attach(line)
    train(Net(), 8)
    assert left_behind() == []
