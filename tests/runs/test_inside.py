"""A run that is tuned within itself: it trains on whatever the search, or a config, does."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from advisor.cache.config import Config, Value
from advisor.command_snippets import tune_again
from advisor.errors import AdvisorWarning
from advisor.open_store import open_records
from advisor.resolve.online import OnlineTuner
from advisor.resolve.request import Request
from advisor.tuners import host
from advisor.tuners.act.pilot import pilot as piloting
from advisor.tuners.act.pilot import protocol
from advisor.tuners.act.pilot.pilot import ActivePilot
from advisor.tuners.act.pilot.protocol import BlockRequest, BlockResult, PilotClient
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.act.ranks import Group
from advisor.tuners.decisions import MAX_OBSERVED_STEPS
from advisor.tuners.measure.run.recorded_steps import RecordedSteps
from advisor.tuners.measure.run.run import AttachedRun
from advisor.tuners.measure.run.session import AttachedScript
from advisor.tuners.search.plan import suffices
from tests import forks
from tests.builders import Net, trained
from tests.forks import alive, started_with, until
from tests.runs.forked import Looks, left_behind, space_of

SCRIPT = """
import gc, os, sys, time
from pathlib import Path

gc.disable()  # what is imported is no garbage: looking through it is a quarter of a start

import advisor

seconds, tune = float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
advice = advisor.apply(tune=tune, permit=advisor.Permit(compile=False))

import torch
import torch.distributed as dist
from torch import nn

net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
if parallel := "RANK" in os.environ:
    dist.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters())
until, over = time.monotonic() + seconds, torch.zeros(1)
while not over:
    loss = net(torch.randn(8, 3, 8, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    enough = Path("enough").exists() or "in force" in advice.report()
    over.fill_(enough or time.monotonic() > until)
    if parallel:
        dist.all_reduce(over)
print(advice.report())
print("loss", loss.item())
if parallel:
    Path(f"said-{dist.get_rank()}").write_text(advice.report())
    dist.barrier()
    os._exit(0)  # gloo's own end is now and then one by SIGABRT
"""
WAIT_S = 60.0
SEARCH = "advisor.online_search"
"""The module that a process which searches runs."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    """Where the pilot of a run finds the process that searches."""
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(str(tmp_path / "pilot"))
        found.listen(1)
        yield found


@pytest.mark.e2e
def test_it_goes_on_with_the_best_and_the_record_is_kept(script: Path) -> None:
    run = [sys.executable, "-m", "advisor", "run", "--tune", "3s", "--"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*run, "python", script.name, "60"],
        cwd=script.parent,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    begins, said = done.stderr.splitlines()
    assert begins == "advisor: tune: trying configs for 3 s; every step trains"
    assert done.stdout.splitlines()[0] == said.removeprefix("advisor: ")
    assert said.startswith("advisor: in force: ") and "; found in this run: " in said
    (record,) = open_records(None).all()
    assert record.target.name == "python train.py 60"
    assert record.trials[0].config == record.baseline.config
    assert record.provenance.how == "within its own run"
    assert tune_again(record) == "advisor tune -- python train.py 60"
    assert not suffices(record.provenance.effort, "quick")


def test_every_process_goes_on_alike(script: Path, tmp_path: Path) -> None:
    """Processes as torchrun starts them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    words, ranks = [sys.executable, script.name, "200", "3s"], []
    for rank in "01":
        env = os.environ | master | {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(forks.Fork(words, cwd=tmp_path, env=env, stdout=2))
    assert [one.wait(200) for one in ranks] == [0, 0]
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert "found in this run" in said[0]
    (record,) = open_records(None).all()
    assert record.key.task.processes == 2


def test_a_script_that_ends_before_its_tuning_says_so_and_ends_the_search(script: Path) -> None:
    words, log = [sys.executable, script.name, "60", "5m"], script.with_name("log")
    with log.open("w") as err, Path(os.devnull).open("w") as out:
        streams = {"stdout": out.fileno(), "stderr": err.fileno()}
        process = forks.Fork(words, cwd=script.parent, env=os.environ, **streams)
        (conductor,) = until(lambda: {*host.family(process.pid)} & {*started_with(SEARCH)})
        script.with_name("enough").touch()
        assert process.wait(WAIT_S) == 0
    _begins, said = log.read_text().splitlines()
    assert said == (
        "advisor: tune: the script ended before its 300 s of tuning were over; the next run "
        "continues the search"
    )
    until(lambda: not alive(conductor))


def test_a_script_that_ends_before_its_tuning_begins_says_so(script: Path) -> None:
    script.write_text(SCRIPT.replace("while not over", "for _ in '123'"))
    done = forks.run(script, "1", "5m", cwd=script.parent)
    assert done.stderr == (
        "advisor: tune: the script ended after 3 steps of its optimizers, before a config could be "
        "tried; use a longer run\n"
    )


@pytest.mark.parametrize("lost", ["the search", "its start"])
def test_the_script_goes_on_without(
    lost: str,
    listening: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    charge: ActivePilot,
) -> None:
    """As where something kills the process that searches, or rank 0 cannot start it and says so,
    for which the others wait."""
    store, net = HashStore(), Net()

    def full(**_: str) -> str:
        raise OSError("no space left on device")

    if lost == "the search":
        monkeypatch.setattr(OnlineTuner, "_shared_folder", lambda *_: str(tmp_path))
        threading.Thread(target=lambda: listening.accept()[0].close()).start()
    else:
        monkeypatch.setattr(tempfile, "mkdtemp", full)
        monkeypatch.setattr(Group, "current", lambda: Group(store, 0, 1))
    charge.attach(OnlineTuner(["python", "train.py"], Request(), tune_s=300.0))
    with pytest.warns(AdvisorWarning, match="the search within this run has failed") as said:
        trained(net, 12)
    assert len(said) == 1
    assert net.dtypes == [torch.float32] * 12
    if lost == "its start":
        assert store.num_keys() == 2  # that of the lookup, and ''


@pytest.mark.usefixtures("listening")
def test_a_search_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    net, charge = Net(), ActivePilot()
    charge.attach(PilotClient(str(tmp_path / "pilot"), None, patience_s=0.2))
    trained(net, 8)
    assert left_behind() == []
    assert set(net.dtypes) == {torch.float32}


def test_a_config_is_held_against_fp32_within_the_run(
    listening: socket.socket, tmp_path: Path, charge: ActivePilot
) -> None:
    """Over the line that a run and the process that searches have; the run stays what it was."""
    data, found = torch.randn(40, 4, 6), []

    def search() -> None:
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
    trained(alone, data)
    (searching := threading.Thread(target=search)).start()
    line = PilotClient(str(tmp_path / "pilot"), None, patience_s=WAIT_S)
    charge.attach(line, RecordedSteps(careful=True))
    trained(net, data)
    searching.join(WAIT_S)
    (compared,) = found
    assert compared.ok, compared
    assert all(map(torch.equal, net.state_dict().values(), alone.state_dict().values()))


def failing(raises: type[Exception], *, backward: bool = False) -> Net:
    """Raises in bf16, in backward or before."""

    def fail(at: Tensor) -> None:
        if at.dtype == torch.bfloat16:
            raise raises("not in bf16")

    net = Net()
    if backward:
        net.backward = fail  # type: ignore[method-assign,assignment]
    else:
        net.conv.register_forward_hook(lambda _net, _given, out: fail(out))
    return net


class Careful(Looks):
    """A guide that tries something, bf16, for three steps, then goes on as the script is."""

    def __init__(self, steps: int = 3, *, needs_room: bool = False, **there: Value) -> None:
        self.steps, self.needs_room = steps, needs_room
        self.there = there or {"precision": "bf16"}
        self.results: list[BlockResult] = []

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        self.seen, self.own = seen, space_of(seen).default
        there, room = self.own.replace(**self.there), self.needs_room
        return BlockRequest(config=there, steps=self.steps, own=self.own, needs_room=room)

    def next(self, result: BlockResult) -> BlockRequest:
        self.results.append(result)
        return BlockRequest(config=self.own, steps=2 if len(self.results) == 1 else 0)

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
    guide, net = Careful(), failing(raises)
    charge.attach(guide)
    trained(net, 12)
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
        return torch.full((3, 8, 8), float(number))


@pytest.mark.parametrize(("bad", "outcome"), [(-1, "ok"), (20, "failed")])
def test_workers_feed_a_config_and_cost_their_lap_alone(
    charge: ActivePilot, monkeypatch: pytest.MonkeyPatch, bad: int, outcome: str
) -> None:
    monkeypatch.setattr(host, "files_read", list)  # pytest's own
    guide, data = Careful(num_workers=1), Samples(bad)
    charge.attach(guide)
    trained(Net(), DataLoader(data, batch_size=4))
    assert [result.outcome for result in guide.results] == [outcome, "ok"]
    assert guide.results[0].reason.startswith("in a worker: ") == (outcome == "failed")
    # The first four batches came before the config, three with it, of these one before the bad one.
    ours = [*range(16), *range(28 if outcome == "ok" else 20, 48)]
    assert data.fetched == ours


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(48, 3, 8, 8))


@pytest.mark.parametrize(
    ("data", "workers", "said"),
    [
        (Samples(), 1, "your script already: 1 loader worker"),
        (Stream(), 0, "not tuned: the loader: every worker would read all of an IterableDataset"),
    ],
)
def test_a_loader_that_stays_as_it_is_is_no_part_of_the_key(
    charge: ActivePilot, data: Dataset[Tensor], workers: int, said: str
) -> None:
    guide = Careful()
    charge.attach(guide)
    trained(Net(), DataLoader(data, batch_size=4, num_workers=workers))
    assert "num_workers" in guide.seen.kept and "num_workers" not in guide.own
    assert (guide.seen.workers, guide.seen.script, guide.seen.lines()[:1]) == (0, "", [said])


def test_a_config_that_raises_in_backward_has_no_order_after_it_until_the_script_goes_on(
    charge: ActivePilot,
) -> None:
    guide, net = Careful(), failing(MemoryError, backward=True)
    charge.attach(guide)
    with pytest.raises(MemoryError) as caught:
        trained(net, 12)
    assert caught.value.__notes__ == ["bf16"]
    assert not guide.results
    trained(net, 8)
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
    guide = OnlineTuner(["python", "train.py"], Request(), tune_s=9.0)
    guide._client = answers = Answers()  # type: ignore[assignment]
    guide.backward_failed(MemoryError("in backward"), BlockRequest(config=own, own=own, steps=3))
    assert [result.reason for result in answers.results] == ["MemoryError: in backward"]
    assert guide.next(BlockResult(outcome="out_of_memory")).steps == 1  # the answer that came then
    assert guide.next(BlockResult(steps=1)).steps == 2


def test_without_room_a_config_is_not_tried(
    charge: ActivePilot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advisor.tuners.act.pilot.pilot.Pilot._has_room", lambda *_: False)
    guide, net = Careful(needs_room=True), Net()
    charge.attach(guide)
    trained(net, 12)
    assert guide.results[0].outcome == "out_of_memory"
    assert "little of the device's memory is free" in guide.results[0].reason
    assert set(net.dtypes) == {torch.float32}


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


def by_hand() -> None:
    net = nn.Linear(6, 4)
    for _ in range(8 * MAX_OBSERVED_STEPS):
        net(torch.ones(2, 6)).sum().backward()


def two_models_in_turn() -> None:
    trained(Net())
    trained(nn.Linear(6, 5), MAX_OBSERVED_STEPS, shape=(4, 6))


@pytest.mark.parametrize(
    ("trains", "said"),
    [
        (without_a_module, piloting.UNSEEN),
        (without_an_order, piloting.UNORDERED),
        (lambda: trained(Net().eval()), piloting.EVALUATING),
        (by_hand, piloting.BY_HAND),
        (two_models_in_turn, piloting.ANOTHER),
    ],
)
def test_what_cannot_be_timed_is_left_alone_with_the_reason(
    charge: ActivePilot, trains: Callable[[], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of this process may have compiled something, which would be told here.
    monkeypatch.setattr("advisor.tuners.act.pilot.pilot.graphs_compiled", lambda: False)
    guide, why = Careful(steps=10**6, precision="default"), list[str]()
    monkeypatch.setattr(guide, "failed", lambda exc: why.append(str(exc)), raising=False)
    charge.attach(guide)
    trains()
    assert why == [said]
    nn.Linear(6, 4)(torch.ones(6))  # the last hook goes with the next call of any module


def test_what_a_process_failed_with_first_is_told_with_file_and_line(tmp_path: Path) -> None:
    """What torchrun says of it is a table; and a process where nobody listens goes on."""
    line = PilotClient(str(tmp_path / "pilot"), None)
    (tmp_path / "train.py").write_text("def load():\n    raise ValueError('bad data')\n\nload()\n")
    with pytest.raises(ValueError, match="bad data") as caught:
        runpy.run_path(str(tmp_path / "train.py"))
    line.failed(caught.value)
    line.failed(RuntimeError("a child failed"))
    assert protocol.startup_failure(str(tmp_path / "pilot")) == "ValueError: bad data (train.py:2)"
    charge = ActivePilot()
    charge.attach(line)
    trained(Net(), 8)
    assert left_behind() == []
