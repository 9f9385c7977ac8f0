"""Tests `advisor tune -- COMMAND` and `advisor run -- COMMAND` with commands as users type them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import advisor as package
from advisor.bootstrap import INJECTED
from advisor.cache.config import Config
from advisor.errors import TargetFailed, WorkerError
from advisor.open_store import open_records
from advisor.tuners import host
from advisor.tuners.act.pilot import protocol
from advisor.tuners.act.pilot.protocol import TRAINING_OVER, UNCLEAR, BlockRequest
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.measure.run import run as running
from advisor.tuners.measure.run import session as sessions
from advisor.tuners.measure.run.guarded_process import GuardedProcess, exit_text, replaces_path
from advisor.tuners.measure.run.run import Run
from advisor.tuners.measure.run.session import CommandProcess, PilotSession, RunEnded
from advisor.tuners.measure.runner import NO_TIME, UNVERIFIED, Block, Compared, ConfigFailed
from advisor.tuners.measure.worker.guard import LOGGED
from tests import forks
from tests.builders import SCRIPT, MadeUpSession
from tests.face.commands import COMMAND, PACE, advisor, env_of
from tests.forks import alive, started_with, until
from tests.runs.forked import space_of

TRAINING = """
import gc
gc.disable()  # scanning imported modules would take a quarter of the start-up
import torch
from torch import nn

def train(steps=10**7, width=16, after=lambda step: None, model=None):
    model = model or nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = torch.randn(32, 8), torch.randint(4, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        after(step)
"""
TRAINS = "from training import train; train(2)"
BY_HAND = "from training import nn, torch; nn.Linear(2, 2)(torch.ones(2))"
QUICK = ("--effort", "quick", "--no-verify", "--budget", "3s", "--trials", "2", "--quiet")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with scripts to run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training.py").write_text(TRAINING)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text("from training import train\ntrain()\n")
    (tmp_path / "train.sh").write_text("python3 -m package.train\n")
    return tmp_path


def script(source: str) -> tuple[str, ...]:
    Path("script.py").write_text(source)
    return ("python", "script.py")


@contextlib.contextmanager
def started_run(command: tuple[str, ...]) -> Iterator[tuple[Run, ScriptFacts, Config]]:
    """Starts a command. Yields the run, the facts about its script, and the script's own config."""
    with Run(command, injected=INJECTED, log=Path("log")) as run:
        seen = run.describe()
        run.baseline, run.tolerance = space_of(seen).default, 0.02
        yield run, seen, run.baseline


def measure(run: Run, config: Config, steps: int = 8) -> Block:
    return run.block(config, steps, deadline_s=60)


# Commands as users type them


LAUNCHER = """
import os, runpy, signal, socket, sys

with socket.create_server(("127.0.0.1", 0)) as free:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
ranks = []
for rank in ("0", "1"):
    os.environ.update(RANK=rank, LOCAL_RANK=rank)
    ranks.append(os.fork())
    if not ranks[-1]:
        del sys.argv[0]
        runpy.run_path(sys.argv[0], run_name="__main__")
        os._exit(0)
ended, status = os.wait()
for rank in set(ranks) - {ended}:
    os.kill(rank, signal.SIGKILL)
sys.exit(status != 0)
"""
"""Starts two ranks as torchrun does, without importing torch for each."""


TORCHRUN = pytest.param("torchrun --nproc-per-node 2", marks=[pytest.mark.e2e, pytest.mark.long])


@pytest.mark.parametrize("launcher", ["python launcher.py", TORCHRUN])
def test_ranks_run_the_same_configs_and_one_may_be_killed(folder: Path, launcher: str) -> None:
    (folder / "launcher.py").write_text(LAUNCHER)
    source = """
import os, pathlib
import torch.distributed as dist
from training import nn, train

dist.init_process_group("gloo")
rank = dist.get_rank()
formats = open(f"formats{rank}", "w")

class Net(nn.Linear):
    def forward(self, x):
        formats.write("bf16\\n" if torch.is_autocast_enabled("cpu") else "unmodified\\n")
        formats.flush()
        return super().forward(x)

def after(step):
    killed = pathlib.Path("killed")
    if rank == 1 and step == 8 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), 9)

import torch
train(model=nn.parallel.DistributedDataParallel(Net(8, 4)), after=after)
"""
    command = (*launcher.split(), *script(source)[1:], str(folder))
    with started_run(command) as (run, seen, own):
        assert (seen.processes, seen.rank, seen.shape) == (2, 0, (64, 8))
        block = measure(run, own)
        assert (block.steps, block.samples) == (8, 8 * 64)
        assert Path("killed").exists()
        half = own.replace(precision="bf16")
        assert measure(run, half).steps == 8
        compared = run.compare(half, deadline_s=60)
        assert compared.ok, compared.reason
        run.stop()
        assert started_with(folder) == []
    both = [Path(f"formats{rank}").read_text().splitlines() for rank in (0, 1)]
    shortest = min(map(len, both))
    assert both[0][:shortest] == both[1][:shortest]
    assert {"bf16", "unmodified"} == set(both[0])


def test_hooks_children_and_checkpoints_of_a_script_are_preserved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start-up code runs, too, and an exception that it raises once ends no tuning."""
    mine = folder / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text("import pathlib\npathlib.Path('customized').touch()")
    monkeypatch.setenv("PYTHONPATH", str(mine), prepend=os.pathsep)
    Path("last.pt").write_text("the user's")
    command = script("""
import importlib.util, os, sys
assert importlib.util.find_spec("torch")  # as transformers checks for torch
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
sys.excepthook = lambda *_: print("mine")
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import train
seen = set()
register_module_forward_hook(lambda *_: seen.add("call"))
register_optimizer_step_post_hook(lambda *_: seen.add("step"))

def after(step):
    assert seen == {"call", "step"}
    torch.save({"step": step}, "last.tmp")
    os.replace("last.tmp", "last.pt")
    assert torch.load("last.pt") == {"step": step}
    if step == 6 and not os.path.exists("raised"):
        open("raised", "w").close()
        raise ValueError("once")

train(after=after)
""")
    with started_run(command) as (run, seen, own):
        assert Path("customized").exists()
        assert seen.shape == (32, 8)
        assert measure(run, own).steps == 8
        assert Path("raised").exists()
    assert "mine" in Path("log").read_text()
    assert Path("last.pt").read_text() == "the user's"


THREADS = """
import sys, types
sys.modules["advisor.bootstrap"] = types.SimpleNamespace(attach=lambda: print("attached"))
(finder,) = (one for one in sys.meta_path if type(one).__name__ == "_Finder")
for spec in [finder.find_spec("torch") for _ in range(2)]:
    spec.loader.exec_module(types.ModuleType("torch"))
import torch
"""
"""Both threads find the module before either has loaded it."""


def test_two_threads_may_import_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "torch.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{INJECTED}{os.pathsep}{folder}", prepend=os.pathsep)
    done = subprocess.run(script(THREADS), capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout) == ("", "attached\n")


def test_endless_output_is_cut_off_in_the_log() -> None:
    endless = "while True: print('x' * 2**21, flush=True)"
    log = Path("log")
    command = GuardedProcess([sys.executable, "-c", endless], log=log, environment=os.environ)
    until(lambda: log.exists() and log.stat().st_size >= LOGGED)
    command.end()
    assert log.stat().st_size <= LOGGED + 2**16 and exit_text(-40) == "signal 40"


COMPILER = """#!/bin/sh
sh -c 'while true; do touch half.so; done' & wait
"""
"""Its linker would write on if the compiler ended first."""


def test_a_killed_compiler_leaves_no_partial_file() -> None:
    """torch.compile would load a partial file in the user's next run."""
    compiler, half = Path("g++"), Path("half.so")
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    starts = "import subprocess; subprocess.run(['./g++', '-o', 'half.so'])"
    command = GuardedProcess([sys.executable, "-c", starts], log=None, environment=os.environ)
    until(half.exists)
    command.end()
    assert not half.exists()


SRUN = """#!/bin/bash
trap 'echo $1 >> ended; exit 143' TERM
touch $1
while true; do read -t 0.05 < /dev/zero; done
"""


def test_srun_ends_its_own_tasks() -> None:
    """They are no descendants. The shell does not go on with its next line meanwhile."""
    srun = Path("srun")
    srun.write_text(SRUN)
    srun.chmod(0o755)
    words = ["/bin/bash", "-c", "./srun first; ./srun second"]
    command = GuardedProcess(words, log=None, environment=os.environ)
    until(Path("first").exists)
    command.end()
    assert Path("ended").read_text() == "first\n" and not Path("second").exists()


def test_a_signal_to_every_process_leaves_the_guard() -> None:
    """Slurm sends it so. The script may catch it; the tuning process decides what follows."""
    waits = "trap 'exit 7' INT; touch begun; while true; do read -t 0.05 < /dev/zero; done"
    command = GuardedProcess(["/bin/bash", "-c", waits], log=None, environment=os.environ)
    until(Path("begun").exists)
    for process in host.family(command.pid):
        os.kill(process, signal.SIGINT)
    until(lambda: command.ended)
    assert command.exit_report()[0] == 7
    command.end()


# Errors


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("print(5)", "with exit code 0; no process of the command has imported torch. Its output"),
        ("input()", "the command ended with exit code 1: EOFError"),
        ("def train(:", "the command ended with exit code 1: SyntaxError: invalid syntax;"),
        (f"sys.modules['advisor'] = None; {TRAINS}", "advisor is not in this Python environment ("),
        (
            f"{TRAINS}; sys.exit(3)",
            "with exit code 3; torch was imported, but no torch.optim optimizer made",
        ),
        (BY_HAND, "a step; the command ended with exit code 0. Its output is in log; advisor"),
        (
            f"{BY_HAND}; sys.exit('bad')",
            "a step; the command ended with exit code 1: bad. Its output",
        ),
        (f"{TRAINS}; raise ValueError('bad')", "could be measured: ValueError: bad (script.py:2)"),
    ],
    ids=[
        "no torch",
        "reads",
        "no code",
        "no advisor",
        "too few steps",
        "by hand",
        "by hand, fails",
        "fails",
    ],
)
def test_a_command_that_cannot_be_measured_says_why(source: str, message: str) -> None:
    with pytest.raises(TargetFailed) as caught, started_run(script(f"import sys\n{source}")):
        pass
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_error_names_no_log_file_if_the_output_is_shown() -> None:
    """The log may be on another machine, or deleted."""
    output: list[str] = []
    run = Run(script("print(5)"), injected=INJECTED, log=Path("log"), show=output.append)
    with pytest.raises(TargetFailed, match=r"torch\. See its output; give .* input is empty"), run:
        run.describe()
    assert "".join(output) == "5\n"


def test_command_without_steps_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "START_S", 1.0)
    done = advisor(folder, "tune", *QUICK, "--", "sleep", "98.76")
    assert done.returncode == 1
    said = "the command has run for 1 s; no process of the command has imported torch"
    assert said in done.stderr
    assert started_with("98.76") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-- python -uI x.py", "python -uI keeps advisor out of the command"),
        ("-- python3 -W error -E x.py", "python -E keeps advisor out of the command"),
        ("-- no-such-program", "command 'no-such-program': no such program"),
        ("-- training.py", "command 'training.py': this file is no program; put python before it"),
        ("-- ./package", "command './package': a folder is no program"),
        ("-- ''", "command '': it is empty"),
        ("-- A=1 python x.py", "command 'A=1': a variable is set by a shell; put env before"),
        ("-- python -c '5\n6'", "command: '5\\n6' is not one printable line"),
        ("--show-output model.py --shape 4x3", "--show-output is for a command after --"),
        ("--loader override model.py --shape 4x3", "--loader is for a command after --"),
    ],
)
def test_command_that_cannot_start_is_refused(folder: Path, words: str, message: str) -> None:
    done = advisor(folder, "tune", *QUICK, *shlex.split(words))
    assert done.returncode == 2
    assert done.stderr.startswith(f"advisor: {message}")
    assert done.stderr.count("\n") == 1


def test_executable_without_an_interpreter_line_is_refused(folder: Path) -> None:
    (folder / "train").touch(0o700)
    with pytest.raises(TargetFailed, match=r"exit code 127: .*train: Exec format error"):
        Run(("./train",), injected=INJECTED, log=Path("log")).describe()
    done = advisor(folder, "run", "--", "./train")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("advisor: command './train': Exec format error; put its interp")


OUTLIVING_PARENT = """
import os, time
if os.fork():
    open("pid", "w").write(str(os.getpid()))
    os.wait()
    time.sleep(987)
from training import train
train(9)
"""


def test_a_parent_that_outlives_training_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "END_S", 0.2)
    command = CommandProcess(script(OUTLIVING_PARENT), injected=INJECTED, log=Path("log"))
    session = PilotSession(command, 60, Path("log"), real=False)
    try:
        own = space_of(session.seen).default
        with pytest.raises(RunEnded, match="give the one that trains"):
            session.block(BlockRequest(config=own, own=own, steps=10**6), time.monotonic() + 60)
    finally:
        session.end()
    until(lambda: not alive(int(Path("pid").read_text())))


def test_advisor_run_within_a_tuned_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(protocol.RUN, '{"tune_s": 0}')  # around the tuning it has no effect
    for inner in ((), ("env", f"{protocol.RUN}={os.environ[protocol.RUN]}")):
        words = (*inner, *script("from training import train; train()"))
        command = CommandProcess(words, injected=INJECTED, log=Path("log"))
        why = pytest.raises(RunEnded, match="advisor run has no effect here")
        with why if inner else contextlib.nullcontext():
            PilotSession(command, 60, Path("log"), real=False).end()


OWN = Config(precision="default")
HALF = Config(precision="bf16")


class MadeUpRun(Run):
    def __init__(self, ends: Callable[[Config, int], Exception | None]) -> None:
        super().__init__(("python", "train.py"), injected=Path(), log=Path())
        self.baseline, self.starts, self._ends = OWN, 0, ends

    def _start(self, words: tuple[str, ...], start_s: float) -> PilotSession:
        self.starts += 1
        return MadeUpSession(ends=self._ends)


def run_error(reason: str, *, own: bool = True) -> RunEnded:
    return RunEnded("failed", reason, own=own)


ANOTHER_MODEL = RunEnded(TRAINING_OVER, "another model", 0)
LATE = RunEnded("timed_out", "no process of the command has imported torch")
BAD, OVER = run_error("ValueError: bad (train.py:4)"), RunEnded("crashed", "exit code 0", 0)


def test_repeated_pytorch_error_is_blamed_on_the_script_not_the_config() -> None:
    error = run_error("RuntimeError: x", own=False)
    run = MadeUpRun(lambda _config, made: error if made > 60 else None)
    failed = []
    with pytest.raises(TargetFailed, match="RuntimeError: x"):
        for _ in range(99):
            try:
                measure(run, HALF)
            except ConfigFailed as exc:
                failed.append(str(exc))
    assert failed == ["RuntimeError: x"]


@pytest.mark.parametrize(
    ("first", "config", "error", "message"),
    [
        (BAD, OWN, TargetFailed, r"fails by itself \(ValueError: bad \(train.py:4\)\)"),
        (OVER, OWN, WorkerError, r"^exit code 0; have it train for longer"),
        (OVER, HALF, ConfigFailed, "budget was over before it had started again"),
        (RunEnded(UNCLEAR, "in several threads"), HALF, TargetFailed, "^in several threads$"),
    ],
)
def test_without_time_to_restart_the_error_says_how_the_first_start_ended(
    first: RunEnded, config: Config, error: type[Exception], message: str
) -> None:
    ends = chain([first], repeat(LATE))
    with pytest.raises(error, match=message):
        measure(MadeUpRun(lambda _config, _made: next(ends)), config)


def test_without_time_to_restart_a_config_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeUpRun(lambda _config, _made: None)
    monkeypatch.setattr(run, "_start", Mock(side_effect=LATE))
    assert run.compare(HALF, deadline_s=0) == Compared(UNVERIFIED, NO_TIME)


@pytest.mark.parametrize(
    ("ended", "message", "starts"),
    [
        (BAD, "the script fails by itself (ValueError: bad (train.py:4)): fix that, then give", 2),
        (RunEnded("crashed", "x", -11), "the script fails by itself (x): fix that, then give", 3),
        (OVER, "exit code 0; have it train for longer, or for more", 3),
        (ANOTHER_MODEL, "another model; give a command that trains one", 3),
    ],
    ids=["fails", "crashes", "few steps", "another model"],
)
def test_failure_of_the_unmodified_script_has_one_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ended: RunEnded, message: str, starts: int
) -> None:
    ends = MadeUpRun(lambda _config, made: ended if made > 4 else None)
    monkeypatch.setattr(Run, "_start", lambda *given: ends._start(*given[1:]))
    done = advisor(folder, "tune", "--budget", "20s", "--", "python", "train.py", **env_of(folder))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"advisor: {message}")
    assert ends.starts == starts
    assert advisor(folder, "show", **env_of(folder)).stdout.startswith("Nothing is tuned yet")


# Tuning, then running

FIRST = ("sh", "train.sh")
PACED = f"""
import os, sys
import torch
from torch import nn
{PACE}
class Net(nn.Conv2d):
    def forward(self, x):
        laid_out = self.weight.is_contiguous(memory_format=torch.channels_last)
        keep_pace(self, 0.005 if laid_out else 0.01)
        return super().forward(x).mean((2, 3))

print("mode", os.environ.get("WANDB_MODE"), flush=True)
net = Net(3, 4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(int(os.environ.get("STEPS", 10**7))):
    optimizer.zero_grad()
    net(torch.randn(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
"""
"""A script for which channels_last is twice as fast."""


@pytest.mark.e2e
def test_killed_tuning_resumes_and_an_interrupted_one_keeps_its_record(folder: Path) -> None:
    """SIGKILL leaves no process and no file. Ctrl-C keeps the best config so far for later runs."""
    (folder / "package" / "train.py").write_text(PACED)
    (folder / "train.sh").write_text(f"exec python3 -m package.train {folder}\n")
    tuning = ("tune", "--no-compile", "--show-output", "--budget", "60s", "--", *FIRST)
    (temporary := folder / "t").mkdir()

    def stop_tuner(number: int, *, after: str) -> tuple[int, str]:
        log = folder / f"tuner{number}"
        with log.open("wb") as out:
            words = [sys.executable, "-m", "advisor", *tuning]
            env = os.environ | {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(folder)}
            tuner = forks.Fork(words, env=env, stdout=out.fileno(), stderr=out.fileno())
        until(lambda: after in log.read_text() or tuner.poll() is not None)
        assert len(started_with(folder)) > 1 and any(temporary.iterdir()), log.read_text()
        os.kill(tuner.pid, number)
        code = tuner.wait()
        until(lambda: started_with(folder) == [])
        assert list(temporary.iterdir()) == []
        return code, log.read_text()

    code, output = stop_tuner(signal.SIGKILL, after="trial 0:")
    assert code == -signal.SIGKILL
    assert output.startswith("advisor: starts the command and ends it when done; ")
    assert "mode disabled" in output
    code, output = stop_tuner(signal.SIGINT, after="trial 1:")
    assert code == 130 and "Traceback" not in output
    assert "continuing an earlier tuning, which measured 1 config\n" in output
    (record,) = open_records(None).all()
    assert record.key.task.command == FIRST
    assert len({trial.number for trial in record.trials}) == len(record.trials) > 1
    given = {"STEPS": "20", "ADVISOR_LOG": "info"}
    ran = advisor(folder, "run", "--", *FIRST, process=True, **given)
    assert (ran.returncode, ran.stdout) == (0, "mode None\n")
    assert f"record {record.id} (exact)" in ran.stderr and "in force: " in ran.stderr
    assert started_with(folder) == []


@pytest.fixture
def faked_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces processes by a script for which channels_last is twice as fast."""

    def step_s(config: Config) -> float:
        return 0.005 if config["channels_last"] else 0.01

    seen = replace(SCRIPT, shape=(4, 3, 8, 8), convolves=True)
    monkeypatch.setattr(Run, "_start", lambda *_: MadeUpSession(seen, step_s=step_s))


@pytest.mark.usefixtures("faked_script")
def test_verifying_a_run_requires_its_command(folder: Path) -> None:
    tuned = advisor(folder, "tune", "--no-compile", "--trials", "2", "--json", "--", *FIRST)
    record = json.loads(tuned.stdout)["record"]["id"]
    refused = advisor(folder, "verify", record)
    reason, line = refused.stderr.strip().split(": give its command, as in: advisor ")
    assert (refused.returncode, reason) == (2, f"advisor: record {record} is of a run")
    words = shlex.split(line)
    at = words.index("--")
    verified = advisor(folder, *words[:at], "--budget", "3s", "--json", *words[at:])
    assert json.loads(verified.stdout)["verdict"] == "holds"


@pytest.mark.usefixtures("faked_script")
def test_a_command_is_tuned_from_python() -> None:
    events: list[Mapping[str, Any]] = []
    permit, budget = package.Permit(compile=False), package.Budget(time="20s", trials=3)
    record = package.tune([*FIRST], permit=permit, budget=budget, on_event=events.append).record
    assert record.key.task.command == FIRST
    assert record.winner("pilot").config["channels_last"]
    tried = [event["config"] for event in events if event["event"] == "trial"]
    assert tried == [dict(trial.config) for trial in record.trials if trial.stage == "compute"]
    assert package.Store().records() == [record]


def test_run_passes_on_input_output_and_exit_code(folder: Path) -> None:
    words = [str(COMMAND), "run", "--", "sh", "-c", "cat; exit 7"]
    ran = subprocess.run(words, input="words", capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "words", "")
    words = ["run", "--", "python", "-I", "-c", "print(5)"]
    isolated = advisor(folder, *words, process=True)
    assert (isolated.returncode, isolated.stdout) == (0, "5\n")
    assert isolated.stderr == "advisor: python -I keeps advisor out; the run is unmodified\n"


@pytest.mark.e2e
def test_command_that_sets_pythonpath_ends_tuning_but_not_a_run(folder: Path) -> None:
    (folder / "outside.py").write_text("import time, torch\ntime.sleep(600)\n")
    words = ("--", "env", "PYTHONPATH=.", "python", "outside.py")
    done = advisor(folder, "tune", "--budget", "20s", *words, process=True)
    assert done.returncode == 1 and "the command sets PYTHONPATH itself" in done.stderr

    ran = advisor(folder, "run", "--", "env", "PYTHONPATH=.", "echo", process=True)
    assert ran.returncode == 0 and "the command sets PYTHONPATH itself" in ran.stderr


def test_shell_script_that_replaces_pythonpath_is_detected() -> None:
    keeps = 'export PYTHONPATH="${PYTHONPATH}:."\n# PYTHONPATH=.\n'
    for line, replaces in ((keeps, False), (f"{keeps}cd x && PYTHONPATH=. python x.py", True)):
        Path("start.sh").write_text(line)
        assert replaces_path(("bash", "start.sh")) is replaces


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_command(number: int) -> None:
    source = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(9))\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    words = [str(COMMAND), "run", "--", "python", "-c", source]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(30) == 9


def test_a_process_without_torch_loads_at_most_sitecustomize_in_addition(folder: Path) -> None:
    command = ("python", "-c", "import sys; print(*sys.modules)")
    alone = subprocess.run(command, capture_output=True, text=True)
    under = advisor(folder, "run", "--", *command, process=True)
    more = set(under.stdout.split()) - set(alone.stdout.split())
    assert {name for name in more if not name.startswith("importlib")} <= {"sitecustomize"}


def test_run_works_in_a_deleted_folder(folder: Path) -> None:
    gone = folder / "gone"
    gone.mkdir()
    line = f"rmdir {gone} && exec {sys.executable} -m advisor run -- {sys.executable} -c 'print(1)'"
    done = subprocess.run(["bash", "-c", line], cwd=gone, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


RUN = ["python", "x.py"]


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ([], {}, r"\[\]: expected a target, or a command as \['python', 'train.py'\]"),
        (["python", 3], {}, "expected a target, or a command"),
        (package.Model(), {"shape": "4x3"}, "target None: expected a name, such as model.py:Net"),
        (RUN, {"permit": package.Permit(step_graph=False)}, "--no-step-graph: read from the run"),
        (RUN, {"budget": package.Budget(length="soon")}, "duration 'soon'"),
    ],
)
def test_invalid_call_raises_usage_error(what: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(package.UsageError, match=message):
        package.tune(what, **options)
