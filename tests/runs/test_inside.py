"""Tunes a run while it trains. The run trains on even if the search or a config fails."""

from __future__ import annotations

import dataclasses
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

gc.disable()  # scanning imported modules would take a quarter of the start-up

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
    Path(f"report-{dist.get_rank()}").write_text(advice.report())
    dist.barrier()
    os._exit(0)  # gloo sometimes aborts at exit
"""
WAIT_S = 60.0
SEARCH = "advisor.online_search"  # the module that the search process runs


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket at which a pilot connects to the search process."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "pilot"))
        server.listen(1)
        yield server


@pytest.mark.e2e
def test_run_continues_with_the_best_config_and_stores_a_record(script: Path) -> None:
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
    first_line, last_line = done.stderr.splitlines()
    assert first_line == "advisor: tune: trying configs for 3 s; every step trains"
    assert done.stdout.splitlines()[0] == last_line.removeprefix("advisor: ")
    assert last_line.startswith("advisor: in force: ")
    assert "; found in this run: " in last_line
    (record,) = open_records(None).all()
    assert record.target.name == "python train.py 60"
    assert record.trials[0].config == record.baseline.config
    assert record.provenance.how == "within its own run"
    assert tune_again(record) == "advisor tune -- python train.py 60"
    assert not suffices(record.provenance.effort, "quick")


def test_all_ranks_continue_with_the_same_config(script: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    words, ranks = [sys.executable, script.name, "200", "3s"], []
    for rank in "01":
        env = os.environ | master | {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(forks.Fork(words, cwd=tmp_path, env=env, stdout=2))
    assert [one.wait(200) for one in ranks] == [0, 0]
    reports = [(tmp_path / f"report-{rank}").read_text() for rank in range(2)]
    assert reports[0] == reports[1]
    assert "found in this run" in reports[0]
    (record,) = open_records(None).all()
    assert record.key.task.processes == 2


def test_script_that_ends_during_tuning_says_so_and_stops_the_search(script: Path) -> None:
    words, log = [sys.executable, script.name, "60", "5m"], script.with_name("log")
    with log.open("w") as err, Path(os.devnull).open("w") as out:
        streams = {"stdout": out.fileno(), "stderr": err.fileno()}
        process = forks.Fork(words, cwd=script.parent, env=os.environ, **streams)
        (searcher,) = until(lambda: {*host.family(process.pid)} & {*started_with(SEARCH)})
        script.with_name("enough").touch()
        assert process.wait(WAIT_S) == 0
    _first_line, last_line = log.read_text().splitlines()
    assert last_line == (
        "advisor: tune: the script ended before its 300 s of tuning were over; the next run "
        "continues the search"
    )
    until(lambda: not alive(searcher))


def test_script_that_ends_before_tuning_starts_says_so(script: Path) -> None:
    script.write_text(SCRIPT.replace("while not over", "for _ in '123'"))
    done = forks.run(script, "1", "5m", cwd=script.parent)
    assert done.stderr == (
        "advisor: tune: the script ended after 3 steps of its optimizers, before a config could be "
        "tried; use a longer run\n"
    )


@pytest.mark.parametrize("lost", ["the search", "its start"])
def test_script_continues_if_the_search_fails(
    lost: str,
    listening: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    active_pilot: ActivePilot,
) -> None:
    """The search process is killed; or rank 0 cannot start it, and must tell the other ranks, which
    wait for its answer."""
    store, net = HashStore(), Net()

    def full(**_: str) -> str:
        raise OSError("no space left on device")

    if lost == "the search":
        monkeypatch.setattr(OnlineTuner, "_shared_folder", lambda *_: str(tmp_path))
        threading.Thread(target=lambda: listening.accept()[0].close()).start()
    else:
        monkeypatch.setattr(tempfile, "mkdtemp", full)
        monkeypatch.setattr(Group, "current", lambda: Group(store, 0, 1))
    active_pilot.attach(OnlineTuner(["python", "train.py"], Request(), tune_s=300.0))
    with pytest.warns(AdvisorWarning, match="the search within this run has failed") as caught:
        trained(net, 12)
    assert len(caught) == 1
    assert net.dtypes == [torch.float32] * 12
    if lost == "its start":
        assert store.num_keys() == 2  # a key of the lookup, and one with an empty folder name


@pytest.mark.usefixtures("listening")
def test_script_continues_if_the_search_hangs(tmp_path: Path) -> None:
    net, active_pilot = Net(), ActivePilot()
    active_pilot.attach(PilotClient(str(tmp_path / "pilot"), None, patience_s=0.2))
    trained(net, 8)
    assert left_behind() == []
    assert set(net.dtypes) == {torch.float32}


def test_config_is_compared_with_fp32_within_the_run(
    listening: socket.socket, tmp_path: Path, active_pilot: ActivePilot
) -> None:
    """The search process asks for it over its connection. The weights stay bit-identical."""
    data, comparisons = torch.randn(40, 4, 6), []

    def search() -> None:
        script, log = AttachedScript(listening), tmp_path / "log"
        run = AttachedRun(script, ["python", "train.py"], log=log)
        run.baseline = space_of(run.describe()).default
        run.tolerance = 0.02
        half = run.baseline.replace(precision="bf16")
        comparisons.append(run.compare(half, deadline_s=60))
        run.leave(run.baseline, "")

    torch.manual_seed(0)
    net, alone = nn.Linear(6, 4), nn.Linear(6, 4)
    alone.load_state_dict(net.state_dict())
    trained(alone, data)
    (search_thread := threading.Thread(target=search)).start()
    client = PilotClient(str(tmp_path / "pilot"), None, patience_s=WAIT_S)
    active_pilot.attach(client, RecordedSteps(careful=True))
    trained(net, data)
    search_thread.join(WAIT_S)
    (compared,) = comparisons
    assert compared.ok, compared
    assert all(map(torch.equal, net.state_dict().values(), alone.state_dict().values()))


def failing_in_bf16(raises: type[Exception], *, backward: bool = False) -> Net:
    """Returns a model that raises in bf16, in forward or in backward."""

    def fail(tensor: Tensor) -> None:
        if tensor.dtype == torch.bfloat16:
            raise raises("not in bf16")

    net = Net()
    if backward:
        net.backward = fail  # type: ignore[method-assign,assignment]
    else:
        net.conv.register_forward_hook(lambda _net, _given, out: fail(out))
    return net


class TryConfig(Looks):
    """A guide that tries a config for some steps, then returns to the script's own config."""

    def __init__(self, steps: int = 3, *, needs_room: bool = False, **values: Value) -> None:
        self.steps, self.needs_room = steps, needs_room
        self.values = values or {"precision": "bf16"}
        self.results: list[BlockResult] = []

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        self.seen, self.own = seen, space_of(seen).default
        config, room = self.own.replace(**self.values), self.needs_room
        return BlockRequest(config=config, steps=self.steps, own=self.own, needs_room=room)

    def next(self, result: BlockResult) -> BlockRequest:
        self.results.append(result)
        return BlockRequest(config=self.own, steps=2 if len(self.results) == 1 else 0)

    def backward_failed(self, exc: Exception, request: BlockRequest) -> None:
        exc.add_note(str(request.config["precision"]))


@pytest.fixture
def active_pilot() -> Iterator[ActivePilot]:
    active_pilot = ActivePilot()
    yield active_pilot
    active_pilot.release()
    assert left_behind() == []


@pytest.mark.parametrize(
    ("raises", "outcome"), [(RuntimeError, "failed"), (MemoryError, "out_of_memory")]
)
def test_config_that_raises_costs_one_step(
    active_pilot: ActivePilot, raises: type[Exception], outcome: str
) -> None:
    guide, net = TryConfig(), failing_in_bf16(raises)
    active_pilot.attach(guide)
    trained(net, 12)
    failed, later = guide.results
    assert (failed.steps, failed.outcome) == (1, outcome)
    assert failed.reason == f"{raises.__name__}: not in bf16"
    assert (later.steps, later.outcome) == (2, "ok")
    assert net.dtypes == [torch.float32] * 12


def test_an_optimizers_compiled_step_is_seen(active_pilot: ActivePilot) -> None:
    guide, net = TryConfig(), Net()
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    active_pilot.attach(guide)
    trained(net, 12, optimizer)
    assert [(one.outcome, one.steps) for one in guide.results] == [("ok", 3), ("ok", 2)]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_traced_call_is_the_scripts_own(active_pilot: ActivePilot) -> None:
    guide, net = TryConfig(), Net()

    def batches() -> Iterator[Tensor]:
        for x in torch.randn(12, 4, 3, 8, 8):
            yield x
            torch.jit.trace(net, x[:1], check_trace=False)  # as TensorBoard's add_graph

    active_pilot.attach(guide)
    trained(net, batches())
    assert guide.seen.shape == (4, 3, 8, 8)
    assert [one.outcome for one in guide.results] == ["ok", "ok"]
    assert torch.bfloat16 in net.dtypes[::2]
    assert set(net.dtypes[1::2]) == {torch.float32}


class Samples(Dataset[Tensor]):
    """Records which samples this process has fetched."""

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
def test_a_failing_loader_worker_ends_only_its_block(
    active_pilot: ActivePilot, monkeypatch: pytest.MonkeyPatch, bad: int, outcome: str
) -> None:
    monkeypatch.setattr(host, "files_read", list)  # without pytest's open files
    guide, data = TryConfig(num_workers=1), Samples(bad)
    active_pilot.attach(guide)
    trained(Net(), DataLoader(data, batch_size=4))
    assert [result.outcome for result in guide.results] == [outcome, "ok"]
    assert guide.results[0].reason.startswith("in a worker: ") == (outcome == "failed")
    # The config starts after four batches and lasts for three; the second of these is the bad one.
    ours = [*range(16), *range(28 if outcome == "ok" else 20, 48)]
    assert data.fetched == ours


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(48, 3, 8, 8))


@pytest.mark.parametrize(
    ("data", "workers", "line"),
    [
        (Samples(), 1, "your script already: 1 loader worker"),
        (Stream(), 0, "not tuned: the loader: every worker would read all of an IterableDataset"),
    ],
)
def test_an_unchanged_loader_is_not_part_of_the_key(
    active_pilot: ActivePilot, data: Dataset[Tensor], workers: int, line: str
) -> None:
    guide = TryConfig()
    active_pilot.attach(guide)
    trained(Net(), DataLoader(data, batch_size=4, num_workers=workers))
    assert "num_workers" in guide.seen.kept and "num_workers" not in guide.own
    assert (guide.seen.workers, guide.seen.script, guide.seen.lines()[:1]) == (0, "", [line])


def test_after_a_failure_in_backward_the_next_block_waits_for_the_script(
    active_pilot: ActivePilot,
) -> None:
    guide, net = TryConfig(), failing_in_bf16(RuntimeError, backward=True)
    active_pilot.attach(guide)
    with pytest.raises(RuntimeError) as caught:
        trained(net, 12)
    assert caught.value.__notes__ == ["bf16"]
    assert not guide.results
    trained(net, 8)
    assert guide.results[0].reason.startswith("RuntimeError: not in bf16 (test_inside.py:")
    assert [one.outcome for one in guide.results] == ["failed", "ok"]


def test_search_learns_of_a_backward_failure_before_the_script_can_end() -> None:
    class FakeClient:
        def __init__(self) -> None:
            self.results: list[BlockResult] = []

        def next(self, result: BlockResult) -> BlockRequest:
            self.results.append(result)
            return BlockRequest(config=own, own=own, steps=len(self.results))

    own = Config(precision="default")
    guide = OnlineTuner(["python", "train.py"], Request(), tune_s=9.0)
    guide._client = client = FakeClient()  # type: ignore[assignment]
    tried = BlockRequest(config=own.replace(precision="bf16"), own=own, steps=3)
    guide.backward_failed(MemoryError("in backward"), tried)
    assert [result.reason for result in client.results] == ["MemoryError: in backward"]
    assert guide.next(BlockResult(outcome="out_of_memory")).steps == 1  # the answer to the failure
    assert guide.next(BlockResult(steps=1)).steps == 2
    guide.script_failed(RuntimeError("the script's own"), dataclasses.replace(tried, config=own))
    assert len(client.results) == 2
    for exc in (RuntimeError("in its evaluation"), AssertionError("it is bfloat16")):
        with pytest.warns(AdvisorWarning, match="the script ended under advice"):
            guide.script_failed(exc, tried)
        assert client.results[-1].reason == f"{type(exc).__name__}: {exc}"


def test_config_is_not_tried_without_free_memory(
    active_pilot: ActivePilot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advisor.tuners.act.pilot.pilot.Pilot._has_room", lambda *_: False)
    guide, net = TryConfig(needs_room=True), Net()
    active_pilot.attach(guide)
    trained(net, 12)
    assert guide.results[0].outcome == "out_of_memory"
    assert "little of the device's memory is free" in guide.results[0].reason
    assert set(net.dtypes) == {torch.float32}


def step_without_a_module() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    for _ in range(8):
        optimizer.step()


def step_optimizers_irregularly() -> None:
    net = nn.Linear(6, 4)
    optimizers = [torch.optim.SGD(net.parameters()) for _ in range(3)]
    for step in range(MAX_OBSERVED_STEPS):
        net(torch.ones(2, 6)).sum().backward()
        optimizers[int(step**0.5) % 3].step()


def update_weights_by_hand() -> None:
    net = nn.Linear(6, 4)
    for _ in range(8 * MAX_OBSERVED_STEPS):
        net(torch.ones(2, 6)).sum().backward()


def train_two_models() -> None:
    trained(Net())
    trained(nn.Linear(6, 5), MAX_OBSERVED_STEPS, shape=(4, 6))


@pytest.mark.parametrize(
    ("train", "why"),
    [
        (step_without_a_module, piloting.UNSEEN),
        (step_optimizers_irregularly, piloting.UNORDERED),
        (lambda: trained(Net().eval()), piloting.EVALUATING),
        (update_weights_by_hand, piloting.BY_HAND),
        (train_two_models, piloting.ANOTHER),
    ],
)
def test_script_that_cannot_be_timed_is_left_alone_with_the_reason(
    active_pilot: ActivePilot, train: Callable[[], None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Graphs that other tests have compiled would change the reason.
    monkeypatch.setattr("advisor.tuners.act.pilot.pilot.graphs_compiled", lambda: False)
    guide, reasons = TryConfig(steps=10**6, precision="default"), list[str]()
    monkeypatch.setattr(guide, "failed", lambda exc: reasons.append(str(exc)), raising=False)
    active_pilot.attach(guide)
    train()
    assert reasons == [why]
    nn.Linear(6, 4)(torch.ones(6))  # removes the last hook, as any call of a module does


def test_first_failure_is_reported_with_file_and_line(tmp_path: Path) -> None:
    """torchrun prints only a table. A process to which nobody listens trains on."""
    client = PilotClient(str(tmp_path / "pilot"), None)
    (tmp_path / "train.py").write_text("def load():\n    raise ValueError('bad data')\n\nload()\n")
    with pytest.raises(ValueError, match="bad data") as caught:
        runpy.run_path(str(tmp_path / "train.py"))
    client.failed(caught.value)
    client.failed(RuntimeError("a child failed"))
    assert protocol.startup_failure(str(tmp_path / "pilot")) == "ValueError: bad data (train.py:2)"
    active_pilot = ActivePilot()
    active_pilot.attach(client)
    trained(Net(), 8)
    assert left_behind() == []
