"""`advisor tune -- COMMAND` and `advisor run -- COMMAND`, on commands as people type them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.errors import TargetFailed, WorkerError
from advisor.piloting import INJECTED
from advisor.tuners.act.pilot.pilot import UNSTEPPED
from advisor.tuners.act.pilot.seen import Seen
from advisor.tuners.act.pilot.variables import KEEP_CHECKPOINTS
from advisor.tuners.knobs import strict
from advisor.tuners.measure.first_step import Compiled
from advisor.tuners.measure.run import run as running
from advisor.tuners.measure.run import session as sessions
from advisor.tuners.measure.run.guarded import how
from advisor.tuners.measure.run.run import Run
from advisor.tuners.measure.run.session import Ended, Session
from advisor.tuners.measure.worker.guard import LOGGED
from tests.face.commands import COMMAND, PACE, Done, advisor, offer_bf16, own, take_over
from tests.runs.forked import space_of

TRAINING = """
import gc
gc.disable()  # what is imported is no garbage: looking through it is a quarter of a start
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
FOREVER = "from training import train\ntrain()\n"
SLOW = "train(after=lambda _step: time.sleep(0.05))"
QUICK = ("--effort", "quick", "--no-verify", "--budget", "3s", "--trials", "2", "--quiet")


@pytest.mark.parametrize(
    ("code", "said"), [(3, "exit code 3"), (-9, "signal SIGKILL"), (-40, "signal 40")]
)
def test_how_a_command_ended(code: int, said: str) -> None:
    assert how(code) == said


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands are typed; `python` is the one that has torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return filled(tmp_path)


def filled(folder: Path) -> Path:
    (folder / "training.py").write_text(TRAINING)
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "train.py").write_text(FOREVER)
    (folder / "train.sh").write_text("python3 -m package.train\n")
    return folder


def script(source: str) -> tuple[str, ...]:
    Path("script.py").write_text(source)
    return ("python", "script.py")


@contextlib.contextmanager
def started(command: tuple[str, ...]) -> Iterator[tuple[Run, Seen, Config]]:
    """A run under measurement, what is seen of it, and the config that it has itself."""
    with Run(command, injected=INJECTED, log=Path("log"), deadline_s=20) as run:
        seen = run.describe()
        run.own = space_of(seen).default
        yield run, seen, run.own


def measured(run: Run, config: Config) -> Measurement:
    return run.measure(config, seconds=0.2)


def processes(mark: object) -> list[int]:
    """Those with this in a word of theirs."""
    found = []
    for one in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if one.name.isdigit() and str(mark).encode() in (one / "cmdline").read_bytes():
                found.append(int(one.name))
    return found


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


# Commands as they are typed


def test_processes_of_torchrun_get_the_same_orders_and_one_may_be_killed_or_hang(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "hangs_s", 5.0)
    source = """
import os, pathlib, sys, time
import torch.distributed as dist
from training import nn, train

dist.init_process_group("gloo")
rank = dist.get_rank()
orders = open(f"orders{rank}", "w")

class Net(nn.Linear):
    def forward(self, x):
        orders.write("bf16\\n" if torch.is_autocast_enabled("cpu") else "as it is\\n")
        orders.flush()
        return super().forward(x)

def after(step):
    killed = pathlib.Path("killed")
    if rank == 1 and step == 30 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), 9)
    hung = pathlib.Path("hung")
    if rank == 1 and step == 31 and killed.exists() and not hung.exists():
        hung.touch()
        time.sleep(3600)

import torch
train(model=nn.parallel.DistributedDataParallel(Net(8, 4)), after=after)
"""
    command = ("torchrun", "--nproc-per-node", "2", *script(source)[1:], str(folder))
    with started(command) as (run, seen, own):
        assert (seen.processes, seen.rank, seen.shape) == (2, 0, (64, 8))
        assert run.measure(own, seconds=0.2, deadline_s=600).ok
        assert Path("killed").exists() and Path("hung").exists()
        half = own.replace(precision="bf16")
        assert measured(run, half).ok
        compared = run.verify(half, against=strict(own), steps=8, tolerance=0.02)
        assert compared.ok, compared.reason
        run.stop()
        assert processes(folder) == []
    both = [Path(f"orders{rank}").read_text().splitlines() for rank in (0, 1)]
    shortest = min(map(len, both))
    assert both[0][:shortest] == both[1][:shortest]
    assert {"bf16", "as it is"} == set(both[0])


def test_what_a_script_does_before_torch_and_with_hooks_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = folder / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text("import pathlib\npathlib.Path('customized').touch()")
    monkeypatch.setenv("PYTHONPATH", str(mine), prepend=os.pathsep)
    command = script("""
import importlib.util, os, sys
assert importlib.util.find_spec("torch")  # as transformers looks whether it is there
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
    if step == 30 and not os.path.exists("raised"):
        open("raised", "w").close()
        raise ValueError("once")

train(after=after)
""")
    with started(command) as (run, seen, own):
        assert Path("customized").exists()
        assert seen.shape == (32, 8)
        assert measured(run, own).ok
        assert Path("raised").exists()
    assert "mine" in Path("log").read_text()


def test_a_process_without_torch_loads_nothing_more() -> None:
    def loaded(path: str) -> set[str]:
        code = "import sys; print(*sys.modules)"
        env = {**os.environ, "PYTHONPATH": path, "ADVISOR_RUN": "{}"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        return set(done.stdout.split())

    bare = {"importlib", "importlib._bootstrap", "importlib._bootstrap_external"}
    more = loaded(str(INJECTED)) - loaded("") - bare - {"importlib.machinery"}
    assert more == {"sitecustomize"}


def test_what_is_printed_without_end_is_cut_off() -> None:
    much = 2**21
    command = script(
        f"from training import train\ntrain(after=lambda step: print('x' * {much}, flush=True))"
    )
    with started(command) as (run, _seen, own):
        while Path("log").stat().st_size < LOGGED:
            assert measured(run, own).ok
        assert measured(run, own).ok
    assert Path("log").stat().st_size <= LOGGED + 2**16


def test_checkpoints_of_a_run_that_is_tuned_are_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They stay what they were, and what the script saves it loads; unless that is not wanted."""
    command = script("""
import os
import torch
from training import train

def after(step):
    torch.save({"step": step}, "last.tmp")
    os.replace("last.tmp", "last.pt")
    assert torch.load("last.pt") == {"step": step}

train(after=after)
""")
    Path("last.pt").write_text("the user's")
    os.utime("last.pt", (1, 1))
    with started(command) as (run, _seen, own):
        assert measured(run, own).ok
    assert Path("last.pt").read_text() == "the user's"
    monkeypatch.setenv(KEEP_CHECKPOINTS, "1")
    with started(command) as (run, _seen, own):
        assert measured(run, own).ok
    assert Path("last.pt").read_bytes() != b"the user's"


# Bad input and bad luck

REFUSED = {
    "no torch": (
        "print(5)",
        "no process of the command has imported torch; it ended with exit "
        "code 0: 5. What it printed is in",
    ),
    "reads": ("input()", "it ended with exit code 1: EOFError"),
    "no code": (
        "def train(:",
        "no process of the command has imported torch; it ended with exit code 1: SyntaxError: "
        "invalid syntax. What it printed is in log; mend that first",
    ),
    "too few steps": (
        "import sys; from training import train; train(2); sys.exit(3)",
        "torch was imported, but no 4 steps of a torch.optim optimizer came; "
        "it ended with exit code 3. What it printed is in log; mend that first",
    ),
    "fails": (
        "from training import train; train(2); raise ValueError('bad data')",
        "it failed before its first steps: ValueError: bad data; it ended with exit code 1",
    ),
    "no module": (
        """
import torch
optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
while True:
    optimizer.step()
""",
        "no module whose parameters the optimizer holds ran with gradients; what can be tuned",
    ),
    "no order": (
        """
import itertools, torch
from training import nn
net = nn.Linear(8, 4)
all = [torch.optim.SGD(net.parameters()) for _ in range(3)]
for step in itertools.count():
    net(torch.ones(2, 8)).sum().backward()
    all[int(step**0.5) % 3].step()
""",
        "in 256 steps of the optimizers no order repeats",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_command_that_cannot_be_measured_says_why(name: str) -> None:
    source, said = REFUSED[name]
    with pytest.raises(TargetFailed) as caught, started(script(source)):
        pass
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_one_that_is_shown_no_file_is_named() -> None:
    """Which may be on another machine, and gone."""
    said: list[str] = []
    run = Run(
        script("print(5)"), injected=INJECTED, log=Path("log"), deadline_s=20, show=said.append
    )
    with pytest.raises(TargetFailed, match=r"exit code 0: 5\. See what it printed; give"), run:
        run.describe()
    assert "".join(said) == "5\n"


def test_no_step_within_the_deadline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "start_s", 0.5)
    done = advisor(folder, "tune", *QUICK, "--", "sleep", "98.76")
    assert done.returncode == 1
    assert "no process of the command has imported torch; it has run for 0.5 s" in done.stderr
    assert processes("98.76") == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("python", "-uI", "x.py"), "python -uI keeps advisor out of the command"),
        (("python3", "-W", "error", "-E", "x.py"), "python -E keeps advisor out of the command"),
        (("no-such-program",), "command 'no-such-program': no such program"),
        (("training.py",), "command 'training.py': this file is no program; put python before it"),
        (("./package",), "command './package': a folder is no program"),
        (("A=1", "python", "x.py"), "command 'A=1': a variable is set by a shell; put env before"),
        (("python", "-c", "5\n6"), "command: '5\\n6' is no text on one line"),
    ],
)
def test_what_cannot_be_started(folder: Path, command: tuple[str, ...], said: str) -> None:
    done = advisor(folder, "tune", *QUICK, "--", *command)
    assert done.returncode == 2
    assert done.stderr.startswith(f"advisor: {said}")
    assert done.stderr.count("\n") == 1


def test_output_is_shown_of_a_command_alone(folder: Path) -> None:
    done = advisor(folder, "tune", "model.py", "--shape", "4x3", "--show-output")
    assert done.returncode == 2
    assert done.stderr.startswith("advisor: --show-output is for a command after --")


def test_of_several_processes_that_fail_the_first_says_why(folder: Path) -> None:
    """What torchrun says of it is a table, whose first and last lines tell nothing."""
    command = ("torchrun", "--nproc-per-node", "1", *script("import torch; assert 0, 'for 2'")[1:])
    with pytest.raises(TargetFailed, match="first steps: AssertionError: for 2; it ended with"):
        Run(command, injected=INJECTED, log=Path("log"), deadline_s=20).describe()


def test_what_no_program_can_be_started_from_is_told(folder: Path) -> None:
    """A file that may be executed, and does not say by what."""
    (folder / "train").write_text("python -m package.train")
    (folder / "train").chmod(0o700)
    with pytest.raises(TargetFailed, match=r"exit code 127: .*train: Exec format error"):
        Run(("./train",), injected=INJECTED, log=Path("log"), deadline_s=20).describe()
    done = advisor(folder, "run", "--", "./train")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("advisor: command './train': Exec format error; put the program")


def test_of_programs_in_turn_the_first_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "END_S", 0.5)
    (folder / "both.sh").write_text("python -c 'from training import *; train(9)'; sleep 987")
    session = Session(("bash", "both.sh"), injected=INJECTED, log=Path("log"))
    try:
        own = space_of(session.seen).default
        with pytest.raises(Ended, match="give the one that trains"):
            session.lap(own, own, 10**6, time.monotonic() + 60)
    finally:
        session.end()
    assert processes("987") == []


def test_one_that_ends_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "RESTARTS", 1)
    with (
        started(script("from training import train\ntrain(20)")) as (run, _seen, own),
        pytest.raises(WorkerError, match=r"the command ended with exit code 0\); .* more epochs"),
    ):
        measured(run, own)


def test_two_models_in_turn_are_not_timed_as_one() -> None:
    command = script("from training import train\ntrain(200)\ntrain(width=32)")
    session = Session(command, injected=INJECTED, log=Path("log"), start_s=60)
    try:
        own = space_of(session.seen).default
        with pytest.raises(Ended, match="another model") as caught:
            session.lap(own, own, 10**6, time.monotonic() + 60)
        assert caught.value.code == 0
    finally:
        session.end()


def test_a_config_that_fails_is_told_where_the_script_catches_everything() -> None:
    command = script("""
import torch
from training import nn, train

class Net(nn.Linear):
    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no half")
        return super().forward(x)

model = Net(8, 4)
while True:
    try:
        train(model=model)
    except (Exception, SystemExit):
        pass
""")
    with started(command) as (run, _seen, own):
        assert measured(run, own).ok
        failed = measured(run, own.replace(precision="bf16"))
        assert (failed.outcome, failed.reason) == ("failed", "RuntimeError: no half")


FAILING = """
import sys, time
from pathlib import Path
from training import train

def after(step):
    time.sleep(0.002)
    if step == 400 and not Path("mended").exists():
        {fails}

train(after=after)
"""


def test_a_script_that_fails_by_itself_is_no_failure_of_a_config() -> None:
    with started(script(FAILING.format(fails="sys.exit(3)"))) as (run, _seen, own):
        why = "the command ended with exit code 3"
        said = rf"fails by itself, as it is, within \d+ steps \({why}\): mend that"
        with pytest.raises(TargetFailed, match=said):
            for _ in range(5):
                assert measured(run, own).ok
                assert measured(run, own.replace(precision="bf16")).ok


def test_what_pytorch_raises_is_a_scripts_own_where_it_comes_again() -> None:
    fails = "raise RuntimeError('a worker of the loader is gone')"
    with started(script(FAILING.format(fails=fails))) as (run, _seen, own):
        seen = []
        with pytest.raises(TargetFailed, match=r"\(RuntimeError: a worker"):
            for _ in range(9):
                seen.append(measured(run, own.replace(precision="bf16")))
        assert [one.reason for one in seen if not one.ok] == [
            "RuntimeError: a worker of the loader is gone"
        ]


def test_a_config_that_fails_as_scripts_do_is_told_from_one(folder: Path) -> None:
    command = script("""
import torch
from training import nn, train

class Net(nn.Linear):
    halves = 0
    def forward(self, x):
        self.halves += torch.is_autocast_enabled("cpu")
        if self.halves == 5:
            raise ValueError("no half")
        return super().forward(x)

train(model=Net(8, 4))
""")
    with started(command) as (run, _seen, own):
        assert measured(run, own).ok
        failed = measured(run, own.replace(precision="bf16"))
        assert (failed.outcome, failed.reason) == ("failed", "ValueError: no half")
        assert measured(run, own).ok


def test_of_a_script_that_fails_by_itself_nothing_is_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_bf16(monkeypatch)  # what is tried has to come to the step that fails
    failing = FAILING.format(fails="raise ValueError('bad sample')")
    command = script(failing.replace("400", "600"))
    words = ("tune", "--no-compile", "--no-verify", "--budget", "8s", "--trials", "4")
    done = advisor(folder, *words, "--", *command, **own(folder))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("advisor: the script fails by itself, as it is, within ")
    assert "(ValueError: bad sample)" in last
    assert advisor(folder, "show", **own(folder)).stdout.startswith("Nothing is tuned yet")
    (folder / "mended").touch()
    words = (*words[:-1], "2")
    again = advisor(folder, *words, "--", *command, **own(folder))
    assert again.returncode == 0, again.stderr
    assert "going on after" in again.stderr


def test_a_start_as_it_is_takes_a_step(tmp_path: Path) -> None:
    """What an advice pays before its first step is counted from there. Nothing is compiled in it,
    so that there are no artifacts."""
    command = script(f"import time\nfrom training import train\n{SLOW}")
    files = Compiled(loads=tmp_path / "none", saves=tmp_path / "saved")
    with started(command) as (run, _seen, own):
        assert run.start(own, deadline_s=60, compiled=files).first_step_s >= 0.05
        assert measured(run, own).ok
        run.save(own, tmp_path / "saved")
        assert measured(run, own).ok
    assert not (tmp_path / "saved").exists()


def test_another_process_that_trains_goes_on_as_it_is() -> None:
    command = script("""
import os, time
from training import train
other = os.fork()
if other:
    train()
while not os.path.exists("measured"):
    time.sleep(0.05)
train(50)
open("through", "w").close()
""")
    with started(command) as (run, _seen, own):
        assert measured(run, own).ok
        Path("measured").touch()
        until(Path("through").exists)


def test_interrupted_or_killed_it_leaves_nothing_and_goes_on(folder: Path) -> None:
    words = ("python", "-m", "package.train", str(folder))
    tuning = ("tune", "--effort", "quick", "--no-verify", "--budget", "60s", "--", *words)
    (temporary := folder / "temporary").mkdir()

    def stopped(number: int, *, once: str) -> tuple[int, str]:
        log = folder / f"tuner{number}"
        with log.open("wb") as out:
            tuner = subprocess.Popen(
                [str(COMMAND), *tuning],
                stdout=out,
                stderr=out,
                env=os.environ | {"TMPDIR": str(temporary)},
                # A runner started in the background ignores it, and so would its children.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        until(lambda: once in log.read_text() or tuner.poll() is not None)
        assert len(processes(folder)) > 1 and any(temporary.iterdir()), log.read_text()
        tuner.send_signal(number)
        code = tuner.wait()
        until(lambda: processes(folder) == [], 10)
        assert list(temporary.iterdir()) == []
        return code, log.read_text()

    code, _said = stopped(signal.SIGKILL, once="trial 0:")
    assert code == -signal.SIGKILL
    code, said = stopped(signal.SIGINT, once="going on after")
    assert code == 130
    assert said.endswith("advisor: interrupted; the same command goes on from here\n")


# Tuned, and run

FIRST = ("sh", "train.sh")
PACED = f"""
import os
import torch
from training import nn, train
{PACE}
class Net(nn.Linear):
    def forward(self, x):
        keep_pace(self, 0.01 if torch.is_autocast_enabled("cpu") else 0.02)
        return super().forward(x)

print("mode", os.environ.get("WANDB_MODE"), flush=True)
train(int(os.environ.get("STEPS", 10**7)), model=Net(8, 4))
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A folder, and what tuning a shell script there said: bf16 is twice as fast."""
    folder = filled(tmp_path_factory.mktemp("tuned"))
    (folder / "package" / "train.py").write_text(PACED)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = ("--show-output", "--json")
    words = [one if one != "3s" else "8s" for one in QUICK if one != "--quiet"]
    with pytest.MonkeyPatch.context() as patch:
        offer_bf16(patch)
        done = advisor(folder, "tune", *words, *more, "--", *FIRST, PATH=path, **own(folder))
    return folder, done


def test_a_shell_script_is_tuned_and_then_served(tuned: tuple[Path, Done]) -> None:
    folder, done = tuned
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["record"]
    task = found["key"]["task"]
    assert (task["command"], task["processes"]) == (list(FIRST), 1)
    said = done.stderr.splitlines()
    assert said[0].startswith("advisor: starts the command and ends it")
    assert "mode disabled" in said
    assert "advisor: its output: " not in done.stderr  # it is shown
    take_over(folder)
    ran = run(folder, *FIRST, STEPS="20", ADVISOR_LOG="info")
    assert ran.returncode == 0
    assert ran.stdout == "mode None\n"
    assert f"record {found['id']} (exact)" in ran.stderr


def test_one_is_measured_again_by_the_line_that_asks_for_its_command(
    tuned: tuple[Path, Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_bf16(monkeypatch)
    folder, done = tuned
    take_over(folder)
    found = json.loads(done.stdout)["record"]

    def again(command: str) -> dict[str, Any]:
        refused = advisor(folder, command, found["id"])
        asked, line = refused.stderr.strip().split(": give its command, as in: advisor ")
        assert (refused.returncode, asked) == (2, f"advisor: record {found['id']} is of a run")
        words = shlex.split(line)
        at = words.index("--")
        done = advisor(folder, *words[:at], "--budget", "8s", "--json", *words[at:])
        assert done.stderr.startswith("advisor: starts the command and ends it")
        return dict(json.loads(done.stdout))

    # What a busy host says of it is its own: that it could not tell, or that it does not hold.
    verified = again("verify")
    assert verified["verdict"] in ("holds", "does not hold", "could not tell")
    for ratio in verified["now"].values():
        assert ratio["low"] <= ratio["high"]
        assert verified["verdict"] != "holds" or ratio["low"] > 1.0
    if not verified["now"]:
        return
    parts = again("explain")["record"]["parts"]
    assert [part["knob"] for part in parts] in ([{"precision": "bf16"}], [])  # where it can tell
    assert all(part["low"] > 1.0 for part in parts)


def test_a_command_that_is_not_the_records_is_refused(tuned: tuple[Path, Done]) -> None:
    take_over(tuned[0])
    id, folder = json.loads(tuned[1].stdout)["record"]["id"], Path.cwd()
    other = advisor(folder, "verify", id, "--", *script(FOREVER), str(folder))
    assert other.returncode == 2
    assert f"record {id} is of another run than this: model " in other.stderr
    assert processes(folder) == []


def run(folder: Path, *command: str, said: str = "", **env: str) -> Done:
    return subprocess.run(
        [str(COMMAND), "run", "--", *command],
        cwd=folder,
        env=os.environ | env,
        input=said,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_run_of_which_nothing_is_known(folder: Path) -> None:
    ran = run(folder, *script("from training import train\ntrain(20)\nprint('through')"))
    assert (ran.returncode, ran.stdout) == (0, "through\n")
    assert ran.stderr.count("advisor: ") == 1
    assert "this run was not tuned" in ran.stderr
    assert "Training goes on as the script is" in ran.stderr


FUNCTIONAL = """
import torch
from torch.func import functional_call, grad, vmap

net = torch.nn.Linear(8, 4)
parameters = {name: p.detach() for name, p in net.named_parameters()}
loss = lambda found, x: functional_call(net, found, (x[None],)).square().mean()
for _ in range(4):
    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, torch.randn(32, 8))
    parameters = {name: p - 0.1 * gradients[name].mean(0) for name, p in parameters.items()}
"""


def test_a_run_that_trains_without_an_optimizer(folder: Path) -> None:
    ran = run(folder, *script(FUNCTIONAL))
    assert ran.returncode == 0
    assert ran.stderr.count("advisor: ") == 1
    assert f"advisor: {UNSTEPPED}\n" in ran.stderr


def test_input_output_and_exit_code_are_the_commands(folder: Path) -> None:
    ran = run(folder, "sh", "-c", "cat; exit 7", said="words")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "words", "")
    isolated = run(folder, "python", "-I", "-c", "print(5)")
    assert (isolated.returncode, isolated.stdout) == (0, "5\n")
    assert isolated.stderr == "advisor: python -I keeps advisor out; it runs as it is\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_the_commands(folder: Path, number: int) -> None:
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


def test_a_process_that_loads_no_torch_loads_nothing_of_advisor(folder: Path) -> None:
    source = "import sys; print([m for m in sys.modules if m.startswith(('advisor', 'msgpack'))])"
    assert run(folder, "python", "-c", source).stdout == "[]\n"


FED = """
import statistics, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 160

    def __getitems__(self, numbers):
        time.sleep(0.03)
        return [(torch.full((8,), float(number)), number % 4) for number in numbers]

class Net(nn.Linear):
    def forward(self, x):
        time.sleep(0.03)  # as a device that computes while the host does not
        return super().forward(x)

net = Net(8, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
began = [time.perf_counter()]
for _ in range(int(sys.argv[1])):
    for x, y in DataLoader(Slow(), batch_size=4, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        began.append(time.perf_counter())
steps = [later - now for now, later in zip(began, began[1:])]
print(statistics.median(steps[:4]) / statistics.median(steps[10:]))
"""


def test_a_script_that_waits_for_its_data_is_given_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # and nothing else is to be tuned
    command = script(FED)
    words = ("--effort", "quick", "--no-verify", "--precisions", "default", "--budget", "12s")
    done = advisor(folder, "tune", *words, "--json", "--", *command, "1000")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)["record"]
    (winner,) = [one["choice"] for one in record["winners"] if one["use"] == "pilot"]
    assert record["baseline"]["config"]["num_workers"] == 0
    assert winner["config"]["num_workers"] > 0, done.stderr
    assert winner["speedup"] > 1.2
    ran = run(folder, *command, "1", ADVISOR_LOG="info")
    assert re.search(r"in force: .*[0-9]+ loader workers?[,;]", ran.stderr), ran.stderr
    # Its first steps are as the script is.
    assert float(ran.stdout) > 1.05
    monkeypatch.setenv("ADVISOR_KEEP_LOADER", "1")
    refused = advisor(folder, "verify", record["id"], "--", *command, "1000")
    assert refused.returncode == 2
    assert "which this one is not given (not tuned: the loader: ADVISOR_KEEP" in refused.stderr


def test_workers_of_a_scripts_own_are_tuned_where_that_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two, which starve the steps; on two cores one is tried beside them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    slow = FED.replace("sleep(0.03)\n        return [", "sleep(0.12)\n        return [")
    command = script(slow.replace("shuffle=True", "shuffle=True, num_workers=2"))
    words = ("--effort", "quick", "--no-verify", "--precisions", "default", "--budget", "6s")
    taken = ("--loader", "override")
    done = advisor(folder, "tune", *words, *taken, "--json", "--", *command, "1000")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)["record"]
    tried = [trial["config"]["num_workers"] for trial in record["trials"]]
    assert record["baseline"]["config"]["num_workers"] == tried[0] == 2 and len(set(tried)) > 1
    assert "ADVISOR_OVERRIDE_LOADER" not in os.environ
    refused = advisor(folder, "tune", *taken, "model.py", "--shape", "4x3")
    assert refused.returncode == 2 and "--loader is for a command after --" in refused.stderr


STORED = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

item_s, ahead, steps = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

class Items(Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, number):
        time.sleep(item_s)
        return torch.ones(8)

class Net(nn.Linear):
    def forward(self, x):
        time.sleep(0.008 if torch.is_autocast_enabled("cpu") else 0.08)
        return super().forward(x)

net = Net(8, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
began = [time.perf_counter()]
for x in DataLoader(Items(), num_workers=4, prefetch_factor=ahead):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
    began.append(time.perf_counter())
    if len(began) > steps:
        break
print(steps // 2 / (began[-1] - began[-1 - steps // 2]))
"""
BOUND = ("0.08", "24")
"""The loader makes 50 batches a second: four times what the script as it is takes, and half of what
it takes in bf16. Two seconds of that lie ready."""


@pytest.mark.parametrize(("loader", "waits"), [(BOUND, True), (("0.016", "2"), False)])
def test_a_turn_is_as_fast_as_its_config_stays(loader: tuple[str, str], waits: bool) -> None:
    with started((*script(STORED), *loader, "100000")) as (run, _seen, own):
        half = own.replace(precision="bf16")
        run.measure(own, seconds=1.5)
        turn = run.measure(half, seconds=0.3)
        assert (turn.waited > 0.35) == waits
        session = run._ensured(half)
        while (long := session.lap(half, own, 80, time.monotonic() + 60)).feeds[0].lent > 2:
            pass  # what lies ready is used up first
        assert 0.75 < turn.samples_per_s * long.seconds / long.samples < 1.25


def test_what_a_record_promises_of_a_loader_that_is_the_limit_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether bf16 is what it promises, or on a busy host nothing beside the script as it is."""
    offer_bf16(monkeypatch)
    command = (*script(STORED), *BOUND)
    words = [one if one != "3s" else "6s" for one in QUICK]
    done = advisor(folder, "tune", *words, "--json", "--", *command, "100000")
    record = json.loads(done.stdout)["record"]
    (winner,) = [one["choice"] for one in record["winners"] if one["use"] == "pilot"]
    loader_makes = 50.0
    assert winner["samples_per_s"] < 1.25 * loader_makes
    as_it_is = record["baseline"]["samples_per_s"]
    assert winner["speedup"] * as_it_is < 1.25 * loader_makes
    ran = run(folder, *command, "240")
    assert float(ran.stdout) < 1.25 * loader_makes
