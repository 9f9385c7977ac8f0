"""Tests `advisor compare`: the verdict, the losses, the worktree, and commands."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from advisor import two_commands
from advisor.cli.measuring import _percent, _split
from advisor.errors import TargetFailed, UsageError, WorkerError
from advisor.report import compared
from advisor.tuners.act.pilot.losses import LossObserver
from advisor.tuners.act.pilot.protocol import BlockRequest
from advisor.tuners.decisions import STARTS
from advisor.tuners.measure.run.session import RunEnded
from advisor.tuners.measure.runner import Block
from advisor.tuners.search.in_turn import COULD_NOT_TELL, FASTER, SAME, SLOWER, InTurn
from advisor.tuners.search.plan import Clock
from advisor.two_commands import CommandsCompared, Side, unlike, worktree_of
from tests.builders import SCRIPT, Heard, MadeUpSession
from tests.face.commands import COMMAND, advisor, env_of
from tests.forks import started_with, until
from tests.runs.forked import left_behind

Time = Callable[[float], float]  # the seconds of a step at a time
STEADY: Time = lambda _now: 0.01  # noqa: E731
NOW = [0.0]  # seconds, made up


class Trains(MadeUpSession):
    """A command that trains until the step `ends_at`, and then ends with the exit code `code`."""

    def __init__(
        self,
        step_s: Time = STEADY,
        ends_at: float = 1e9,
        code: int = 0,
        loss: Callable[[int], float] = lambda _step: 1.0,
    ) -> None:
        super().__init__(SCRIPT)
        self.time, self.ends_at, self.code, self.loss = step_s, ends_at, code, loss

    def block(self, request: BlockRequest, until: float) -> Block:
        first, steps = self.made, request.steps
        self.made += request.warm + steps
        if self.made > self.ends_at:
            raise RunEnded("crashed", f"the command ended with exit code {self.code}", self.code)
        seconds = steps * self.time(NOW[0])
        NOW[0] += seconds * (1 + request.warm / steps)
        losses = tuple(map(self.loss, range(first, self.made)))
        return Block(steps=steps, samples=4 * steps, seconds=seconds, losses=losses)


def noisy(rng: random.Random, slower: float = 1, noise: float = 0.005, drift: float = 0) -> Time:
    return lambda now: 0.01 * slower * math.exp(rng.gauss(0, noise) + drift * now)


def in_turn(first: Trains, second: Trains, turns: InTurn | None = None, s: float = 60) -> InTurn:
    """Measures both for `s` seconds, in addition to earlier turns."""
    NOW[0], turns = 0.0, turns or InTurn()
    clock = Clock(s, now=lambda: NOW[0])
    turns.measure((first, second), clock)
    assert clock.spent_s <= s + 2
    return turns


def in_two_starts(*times: Time) -> str:
    """The verdict, after a second start if the first one found a difference."""
    turns = in_turn(*map(Trains, times), s=40)
    return (in_turn(*map(Trains, times), turns, s=20) if turns.unconfirmed else turns).verdict


def test_the_verdict_is_about_the_second_command_and_drift_does_not_count() -> None:
    rng = random.Random(0)
    for slower, expected in ((1.0, SAME), (1.05, SLOWER), (1 / 1.05, FASTER)):
        times = noisy(rng, drift=0.01), noisy(rng, slower, drift=0.01)
        verdicts = [in_two_starts(*times) for _ in range(20)]
        assert verdicts.count(expected) >= 19
        assert set(verdicts) <= {expected, COULD_NOT_TELL}


def test_much_noise_gives_no_verdict_on_equal_commands() -> None:
    rng = random.Random(1)
    found = [in_two_starts(*(noisy(rng, noise=0.1) for _ in "AB")) for _ in range(40)]
    assert sum(one != COULD_NOT_TELL for one in found) <= 1


def test_a_difference_counts_once_a_second_start_confirms_it() -> None:
    rng = random.Random(2)
    first, second = Trains(noisy(rng, noise=0.001)), Trains(noisy(rng, 1.02, noise=0.001))
    turns = in_turn(first, second)
    assert (turns.verdict, turns.unconfirmed) == (COULD_NOT_TELL, True)
    assert turns.doubt.startswith("no time was left to confirm it in a second start")
    again = in_turn(second, first, deepcopy(turns), s=20)
    assert (again.verdict, again.unconfirmed) == (COULD_NOT_TELL, False)
    assert again.doubt.startswith("the interval is too wide")
    in_turn(first, second, turns, s=20)
    assert (turns.verdict, turns.unconfirmed) == (SLOWER, False)


def losses_of(*losses: Callable[[int], float]) -> Any:
    return in_turn(*(Trains(loss=one) for one in losses), s=20).losses()


def test_losses_differ_only_beyond_their_noise() -> None:
    rng = random.Random(4)

    def falls(scale: float, noise: float) -> Callable[[int], float]:
        return lambda step: scale * (0.5 + math.exp(-step / 100)) * (1 + rng.gauss(0, noise))

    same = losses_of(falls(1, 0), falls(1, 0))
    assert not same.differ and same.means[0] == same.means[1] and same.steps > 300
    assert not losses_of(falls(1, 0.1), falls(1, 0.1)).differ  # another order of the data
    assert not losses_of(falls(1, 0), falls(1.005, 0)).differ  # another number format
    assert losses_of(falls(1, 0), falls(1.03, 0)).differ
    assert losses_of(falls(1, 0), lambda step: math.nan if step > 300 else falls(1, 0)(step)).differ


def test_commands_that_train_different_things() -> None:
    for other, expected in (
        (replace(SCRIPT, model="cd" * 32, optimizer="adam", dtype="float16"), ""),
        (replace(SCRIPT, parameters=2), "models of 1 and of 2 parameters"),
        (replace(SCRIPT, shape=(4, 9)), "batches of 4x8 and of 4x9"),
        (replace(SCRIPT, shape=(4, 1), varies=True), ""),
        (replace(SCRIPT, shape=(1, 8), varies=True), "batches of 4x8 and of 1x8"),
    ):
        assert unlike((MadeUpSession(), MadeUpSession(other))) == expected


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The sessions that starts give, in order; an exception is raised. Time is made up, too."""
    sessions: list[Any] = []

    def start(*_args: object, **_named: object) -> Any:
        if isinstance(given := sessions.pop(0), Exception):
            raise given
        return given

    monkeypatch.setattr(two_commands, "CommandProcess", lambda *_args, **_named: None)
    monkeypatch.setattr(two_commands, "PilotSession", start)
    monkeypatch.setattr(two_commands, "Clock", partial(Clock, now=lambda: NOW[0]))
    yield sessions
    assert sessions == []


BOTH = (Side(name="A", command=("python", "a|b.py")), Side(name="B", command=("python", "b.py")))


def compare(folder: Path, heard: Heard | None = None) -> CommandsCompared:
    store, progress = str(folder / "store"), heard or Heard()
    return two_commands.compare_commands(BOTH, budget_s=60.0, cache=store, progress=progress)


def test_a_short_command_starts_again(tmp_path: Path, made_up: list[Any]) -> None:
    rng, heard = random.Random(5), Heard()
    for _ in range(STARTS):  # the second start begins with B
        made_up += [Trains(noisy(rng, noise=0.2), ends_at=400) for _ in range(2)]
    found = compare(tmp_path, heard)
    assert found.turns.verdict == COULD_NOT_TELL
    assert found.reason == "B: the command ended with exit code 0; have it train longer"
    assert [one[0] for one in heard.phases if "starts" in one] == ["A", "B", "B", "A", "A", "B"]
    made_up += [Trains(ends_at=1), Trains()] * STARTS
    with pytest.raises(WorkerError, match="exit code 0; have it train longer"):
        compare(tmp_path)


def test_failures_name_the_command(tmp_path: Path, made_up: list[Any]) -> None:
    full = RunEnded("out_of_memory", "CUDA out of memory")
    other = MadeUpSession(replace(SCRIPT, shape=(2, 8)))
    for kind, said, *sides in (
        (
            TargetFailed,
            "A: the command ended with exit code 1",
            Trains(ends_at=90, code=1),
            Trains(),
        ),
        (TargetFailed, "A: no steps", RunEnded("failed", "no steps")),
        (TargetFailed, "B: both must fit into the memory at once", Trains(), full),
        (UsageError, "train different things, batches of 4x8 and of 2x8", Trains(), other),
    ):
        made_up += sides
        with pytest.raises(kind, match=said):
            compare(tmp_path)


def test_result_as_markdown_and_as_data(tmp_path: Path, made_up: list[Any]) -> None:
    made_up += [Trains(), Trains(lambda _now: 0.02), Trains(lambda _now: 0.02), Trains()]
    found = compare(tmp_path)
    text = compared.markdown(found, "too slow")
    assert "- B is slower than A: 0.500x as fast (0.500-0.500, 95%), 10 turns\n- too slow" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1 and "a&#124;b.py" in rows[2]
    data = json.loads(json.dumps(compared.as_plain(found), allow_nan=False))
    assert (data["verdict"], data["B"]["samples_per_s"]) == (SLOWER, pytest.approx(200))


def test_losses_are_read_without_scale_and_summed_over_a_step() -> None:
    weight, observer = nn.Parameter(torch.tensor([2.0])), LossObserver()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    observer.begin()
    for _ in range(2):
        (0.5 * weight.sum()).backward()
    observer.end_step()
    scaler.scale((3 * weight).sum()).backward()
    observer.end_step()
    inner = checkpoint(lambda x: x * weight, torch.ones(1, requires_grad=True), use_reentrant=True)
    inner.sum().backward()  # calls backward within backward
    observer.end_step()
    observer.end_step()  # a step without a loss
    weight.sum().backward()  # of a step that is not over
    assert observer.taken() == (2.0, 6.0, 2.0)
    assert weight.grad is not None and weight.grad.item() == 1 + 3 * 1024 + 1 + 1
    observer.remove()
    assert left_behind() == [] and not hasattr(torch.amp.GradScaler.scale, "__wrapped__")


SOURCE = """
import torch
from net import Net
data = torch.load("data/data.pt")
torch.manual_seed(0)
model = Net(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(data[torch.randint(len(data), (4,))]).square().mean().backward()
    optimizer.step()
"""
NET = """
from torch import nn
class Net(nn.Linear):
    pass
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a repository with a script, and data that git ignores."""
    folder = tmp_path / "repository"
    (folder / "sub").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for name, text in (("train.py", SOURCE), ("net.py", NET), (".gitignore", "data/\n")):
        Path(name).write_text(text)
    (folder / "data").mkdir()
    torch.save(torch.ones(16, 8), "data/data.pt")
    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first")
    return folder


def git(*words: str) -> str:
    return subprocess.check_output(["git", *words], text=True)


def worktrees() -> int:
    return len(git("worktree", "list").splitlines())


def test_a_worktree_has_the_commit_and_links_what_git_does_not_track(repository: Path) -> None:
    (repository / "net.py").write_text("changed")
    (repository / "new.yaml").write_text("new")
    (repository / ".git/hooks/post-checkout").write_text("#!/bin/sh\nexit 1\n")
    (repository / ".git/hooks/post-checkout").chmod(0o755)
    with worktree_of("main", ("python", "train.py")) as ((first, second), said):
        folder = first.folder
        assert folder and (folder / "net.py").read_text() == NET and second.folder is None
        assert (folder / "new.yaml").read_text() == "new"
        assert (folder / "data/data.pt").samefile("data/data.pt")
        assert worktrees() == 2
        assert "B this folder with 1 changed files" in said
    assert worktrees() == 1 and not folder.exists()
    assert torch.load("data/data.pt").sum() == 16 * 8 and Path("new.yaml").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--ref nope -- python train.py", "'nope': no such branch, tag or commit"),
        ("-- python train.py", "give two commands, each after --, as in"),
        ("--ref main", "give two commands, each after --, as in"),
        ("-- python a.py -- advisor run -- python b.py", "expected one '--' between the commands"),
        ("--fail-slower 0.99% -- python a.py -- python b.py", "expected a percentage from 1%"),
        ("--budget 1s -- python a.py -- python b.py", "budget 1s: expected from 3s"),
        ("-- python a.py -- ./b", "command './b': no such program"),
        ("--ref main -- python a.py in sub", "that commit has no folder 'sub/'"),
        ("--ref main -- python train.py in ..", "'main' needs a git repository"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    words: str, expected: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, _, folder = words.partition(" in ")
    monkeypatch.chdir(repository / folder)
    done = advisor(Path.cwd(), "compare", *words.split())
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert expected in done.stderr


def test_commands_are_split_in_the_middle() -> None:
    assert _split(("a", "-x", "--", "b"), None) == (("a", "-x"), ("b",))
    assert _split(("a", "--", "b", "--", "a", "--", "c"), None)[1] == ("a", "--", "c")
    assert _split(("a", "--", "b"), "main") == (("a", "--", "b"),) * 2
    assert (_percent("3%"), _percent(" 2.5 ")) == (0.03, 0.025)


def test_a_change_is_compared_with_a_branch(repository: Path, tmp_path: Path) -> None:
    slow = "    def forward(self, x):\n        import time; time.sleep(0.01)\n"
    (repository / "net.py").write_text(NET + slow + "        return super().forward(x)\n")
    out = tmp_path / "out.md"
    options = ("--ref", "main", "--budget", "20s", "--json", "--markdown", str(out))
    done = advisor(repository, "compare", *options, "--", "python", "train.py")
    found = json.loads(done.stdout)
    assert found["verdict"] in (SLOWER, COULD_NOT_TELL)
    assert found["B"]["step_s"] >= 0.01
    assert found["losses"]["means"][0] == found["losses"]["means"][1] > 0
    assert "main: python train.py" in out.read_text() and worktrees() == 1


def test_code_of_the_other_tree_is_refused(repository: Path) -> None:
    (repository / "start.py").write_text(
        f"import sys\nsys.path.insert(0, {str(repository)!r})\nexec(open('train.py').read())\n"
    )
    done = advisor(repository, "compare", "--ref", "main", "--", "python", "start.py")
    assert (done.returncode, worktrees()) == (1, 1)
    assert f"\nadvisor: A: net is {repository}/net.py, and not the" in done.stderr
    command = ("python", str(repository / "train.py"))
    done = advisor(repository, "compare", "--ref", "main", "--", *command)
    assert (done.returncode, worktrees()) == (2, 1)
    assert done.stderr.endswith(f"'main': give {command[1]} relative to this folder\n")


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_leaves_nothing(
    repository: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = [str(COMMAND), "compare", "--ref", "main", "--", "python", "train.py", str(tmp_path)]
    env = os.environ | env_of(tmp_path) | {"TMPDIR": str(tmp_path)}
    with (tmp_path / "err").open("w+") as err:
        # A test run in the background ignores SIGINT, which its children would inherit.
        act = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(command, env=env, stderr=err, preexec_fn=act)
        until(lambda: "both train" in Path(err.name).read_text() or process.poll() is not None)
        process.send_signal(number)
        assert process.wait(60) == 130
    assert "Traceback" not in (tmp_path / "err").read_text()
    assert (worktrees(), list(tmp_path.glob("advisor.*"))) == (1, [])
    until(lambda: started_with(f"train.py\0{tmp_path}") == [])
