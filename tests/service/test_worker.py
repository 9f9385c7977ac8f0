"""A tuning from where it is asked for to where it is found: `advisor serve` on this machine, with
workers, processes and bad luck that are real."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import advisor as package
from advisor.cache.reader import EVERYTHING
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.cache.stores.dir import DirStore
from advisor.jobs import parcel, worker
from advisor.report.text import spread
from advisor.service import attempts
from advisor.service.executors import Room
from advisor.tuners import host
from advisor.tuners.environment import Gpu
from advisor.tuners.measure.run.guarded_process import GuardedProcess
from tests.cache import servers
from tests.cache.examples import record
from tests.face.commands import LAYERED, SHAPE
from tests.service.serving import Served, ask, fresh, serving
from tests.service.test_serve import Process

TARGET = {
    "target": "model.py:Net",
    "options": {"shape": [SHAPE], "batches": "4", "compile": False, "seed": 1},
    "gpus": 0,
}
SCRIPT = """
import os, sys, time

while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from model import Net

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(4, (64,))), batch_size=4)
for _ in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    print("an epoch is over")
"""
SERVE = """
from advisor.cli import main
from advisor.service import reconcile

reconcile.EVERY_S = 0.2  # tests wait for what it sees
main()
"""
EARLIER = "visits of an earlier run"
HANGS = """
import os, sys, time

if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    with open(sys.argv[1] + "/daemon", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)
    os._exit(0)
with open(sys.argv[1] + "/hangs", "w") as file:
    file.write(str(os.getpid()))
print("token", os.environ.get("ADVISOR_TOKEN"), flush=True)
while True:
    os.write(1, b"x" * 65535 + b"\\n")
"""


@dataclass
class Team:
    """A server that may be killed and started again, and someone who asks it for tunings."""

    folder: Path
    port: int = field(default_factory=servers.free_port)
    server: Process | None = None
    token: str = ""

    def start(self) -> None:
        words = ("--database", f"sqlite:///{self.folder}/service.db", "--port", str(self.port))
        self.server = Process(*words, program=("-c", SERVE))
        self.token = self.token or self.server.token

    def stop(self, how: signal.Signals) -> int:
        assert self.server is not None
        return self.server.stop(how)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}?timeout=20s"

    def submit(self, files: dict[str, str], **asked: Any) -> int:
        code = self.folder / f"code-{time.monotonic_ns()}"
        code.mkdir()
        for name, text in files.items():
            (code / name).write_text(text)
        packed = parcel.pack(code)
        path = f"/api/archives/{packed.digest}"
        assert ask(self.port, "PUT", path, self.token, packed.archive).status == 201
        said = ask(self.port, "POST", "/api/jobs", self.token, asked | {"archive": packed.digest})
        assert said.status == 201, said.data
        number: int = said.json["id"]
        return number

    def job(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = ask(self.port, "GET", f"/api/jobs/{number}", self.token).json
        return found

    def log(self, number: int) -> str:
        text, after = "", 0
        while part := ask(
            self.port, "GET", f"/api/jobs/{number}/log?after={after}", self.token
        ).json:
            text, after = text + part["text"], part["next"]
            if not part["text"]:
                break
        return text

    def until(self, number: int, there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        limit = time.monotonic() + 200
        while not there(found := self.job(number)):
            assert time.monotonic() < limit, (found, self.log(number)[-2000:])
            assert found["state"] not in ("done", "failed", "cancelled"), (found, self.log(number))
            time.sleep(0.1)
        return found

    def ended(self, number: int) -> dict[str, Any]:
        over = ("done", "failed", "cancelled")
        return self.until(number, lambda job: job["state"] in over)

    @property
    def places(self) -> Iterator[Path]:
        """The folders of attempts."""
        return (self.folder / "cache").glob("advisor/jobs/*/advisor-*")

    @property
    def workers(self) -> list[int]:
        """The processes of attempts, each with all that it started."""
        found = [place / "pid" for place in self.places]
        pids = [int(path.read_text()) for path in found if path.exists()]
        return [one for pid in pids if alive(pid) for one in host.family(pid)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(*pids: int) -> bool:
    limit = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    return not any(map(alive, pids))


@contextlib.contextmanager
def a_team(folder: Path) -> Iterator[Team]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        team = Team(folder)
        team.start()
        try:
            yield team
        finally:
            with contextlib.suppress(ProcessLookupError):
                assert team.stop(signal.SIGTERM) == 0
            assert team.workers == []


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """A server that the tests below share."""
    with a_team(tmp_path_factory.mktemp("team")) as found:
        yield found


def test_a_model_is_tuned_and_found_by_others(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = team.submit({"model.py": LAYERED}, **few_trials())
    job = team.ended(number)
    assert (job["state"], len(job["attempts"])) == ("done", 1), (job, team.log(number))
    assert job["trials"][0]["what"] == "torch default" and job["trials"][0]["ratio"] == 1
    assert job["attempts"][0]["device"].endswith(": CPU")
    assert {one["batch"] for one in job["trials"]} == {4}
    (found,) = job["attempts"]
    assert found["reason"] == job["reason"] and re.fullmatch(
        rf"record {job['record']}: (\d\.\d\dx \(.*\) over|nothing is clearly faster than) "
        "torch's default",
        job["reason"],
    )
    log = team.log(number)
    assert "Net: " in log and "trial 0:" in log
    assert tempfile.gettempdir() not in log  # what lay there is gone
    monkeypatch.setenv("ADVISOR_TOKEN", team.token)
    monkeypatch.setenv("ADVISOR_CACHE", team.url)
    (held,) = Records(open_store(team.url)).held(EVERYTHING)
    tried = [one for one in held.record.trials if one.stage == "compute"]
    assert (held.record.id, len(tried)) == (job["record"], len(job["trials"]))
    # From elsewhere, with the same code, and by the line that its log ends with.
    (tmp_path / "model.py").write_text(LAYERED)
    monkeypatch.chdir(tmp_path)
    _, _, lines = log.partition("In your script, with ADVISOR_CACHE=")
    url, line, *_ = lines.splitlines()
    assert url == f"http://127.0.0.1:{team.port}:" and "dir:" not in log
    asked = line.strip().removeprefix("advice = ").replace(".apply(", ".lookup(")
    advice = eval(asked, {"advisor": package})
    assert (advice.status, advice.record.id) == ("exact", job["record"])
    (tmp_path / "model.py").write_text(LAYERED.replace("0.015", "0.020"))
    with pytest.warns(package.AdvisorWarning, match="file another of this name"):
        assert (
            package.lookup(package.Model("model.py:Net", device="cpu"), shape=SHAPE).status
            == "miss"
        )
    assert gone(*team.workers) and list(team.places) == []


def few_trials() -> dict[str, Any]:
    """Which end a tuning, however slow the host is."""
    more = {"budget": "30s", "effort": "quick", "trials": 3}
    return TARGET | {"options": {**TARGET["options"], **more}}  # type: ignore[dict-item]


def test_a_script_as_it_is_comes_through_bad_luck(tmp_path: Path) -> None:
    """Its worker is killed with all that it started: another one goes on with what was tried. Its
    server is killed: the worker goes on, and is found again. Its server is told to stop: the worker
    saves what it has, and the job goes on when the server is back. It is done once."""
    with a_team(tmp_path) as team:
        files = {"model.py": LAYERED, "train.py": SCRIPT}
        options = {"budget": "10s", "compile": False}
        gate = tmp_path / "gate"
        gate.touch()
        command = ["python", "train.py", str(gate)]
        number = team.submit(files, command=command, options=options, gpus=0)
        first = team.until(number, lambda job: len(job["trials"]) >= 2)
        gate.unlink()  # the next one waits for the server, which takes a while to be back
        killed = team.workers
        for process in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        assert gone(*killed)

        team.until(
            number, lambda job: len(job["attempts"]) == 2 and job["attempts"][1]["device"] != ""
        )
        team.until(number, lambda job: job["attempts"][1]["device"].endswith(": CPU"))
        second = team.workers
        assert team.stop(signal.SIGKILL) == -signal.SIGKILL and alive(second[0])
        team.start()
        gate.touch()
        team.until(number, lambda _job: team.log(number).count(EARLIER) == 1)
        assert second[0] in team.workers and len(team.job(number)["attempts"]) == 2

        assert team.stop(signal.SIGTERM) == 0 and gone(*second)
        team.start()
        job = team.ended(number)
        assert job["state"] == "done" and job["record"], (job, team.log(number))
        assert [one["state"] for one in job["attempts"]] == ["lost", "preempted", "done"]
        log = team.log(number)
        assert log.count(EARLIER) == 2 and "an epoch is over" in log
        events = ask(team.port, "GET", "/api/audit", team.token).json["events"]
        assert [one["action"] for one in events].count("job done") == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ADVISOR_TOKEN", team.token)
            (held,) = Records(open_store(team.url)).held(EVERYTHING)
        tried = {trial.number for trial in held.record.trials}
        assert {one["number"] for one in first["trials"]} <= tried


def test_what_is_cancelled_leaves_nothing(team: Team, tmp_path: Path) -> None:
    """Of a command that prints without end, never trains, and has a daemon."""
    files = {"hangs.py": HANGS}
    command = ["python", "hangs.py", str(tmp_path)]
    number = team.submit(files, command=command, options={"budget": "3m"}, gpus=0)
    daemon, hangs = tmp_path / "daemon", tmp_path / "hangs"
    team.until(number, lambda _job: daemon.exists() and hangs.exists())
    team.until(number, lambda _job: "are left out" in team.log(number))
    family = [*team.workers, int(daemon.read_text()), int(hangs.read_text())]
    said = ask(team.port, "POST", f"/api/jobs/{number}/cancel", team.token)
    assert said.json == {"state": "cancelled"}
    assert gone(*family)
    limit = time.monotonic() + 60
    while (job := team.job(number))["attempts"][0]["state"] == "running":
        assert time.monotonic() < limit
        time.sleep(0.1)
    assert (job["state"], job["attempts"][0]["state"]) == ("cancelled", "cancelled")
    log = team.log(number)
    assert "token None" in log and len(log) < 2**23
    links = (team.folder / "cache").glob("advisor/jobs/*/*/work")
    assert [link for link in links if link.exists()] == []


def test_a_command_that_fails(team: Team) -> None:
    files = {"train.py": "raise SystemExit('no data here')"}
    number = team.submit(files, command=["python", "train.py"], gpus=0)
    job = team.ended(number)
    assert (job["state"], len(job["attempts"])) == ("failed", 1)
    assert "no data here" in job["reason"], job
    assert "no data here" in team.log(number)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that starts nothing: workers run in the test's own process."""
    with serving(f"sqlite:///{tmp_path_factory.mktemp('database')}/service.db") as found:
        yield found


def attempt(served: Served, files: dict[str, str], folder: Path, **asked: Any) -> int:
    """A job that is claimed; `served` has its start token."""
    code = folder / "code"
    code.mkdir()
    for name, text in files.items():
        (code / name).write_text(text)
    packed = parcel.pack(code)
    assert (
        served.ask("PUT", f"/api/archives/{packed.digest}", "submit", packed.archive).status < 300
    )
    said = served.ask("POST", "/api/jobs", "submit", {**asked, "archive": packed.digest, "gpus": 0})
    with served.database.writing() as session:
        found = attempts.claim(session, "here", Room(gpu="", gpus=0))
    assert found is not None and found.job == said.json["id"]
    served.tokens["start"] = found.token
    return found.job


@pytest.fixture
def claimed(served: Served) -> Callable[..., int]:
    def claim(*args: Any, **asked: Any) -> int:
        fresh(served)
        return attempt(served, *args, **asked)

    return claim


def client(served: Served) -> worker.AttemptClient:
    return worker.AttemptClient(served.url, served.tokens["start"])


def state(served: Served, number: int) -> tuple[str, str]:
    job = served.ask("GET", f"/api/jobs/{number}", "read").json
    return job["state"], job["reason"]


def test_a_full_disk_is_one_clear_reason(
    served: Served, claimed: Callable[..., int], tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"mounts nothing here: {mounted.stderr.decode().strip()}")
    try:
        files = {f"{n}.txt": str(n) * 2**16 for n in range(8)}
        number = claimed(files, tmp_path, command=["python", "train.py"])
        worker.Working(client(served), small / "work").run()
        told, reason = state(served, number)
        assert told == "failed" and "No space left on device" in reason and str(small) in reason
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_server_that_does_not_come_back(
    served: Served, claimed: Callable[..., int], tmp_path: Path
) -> None:
    claimed({}, tmp_path, command=["python", "train.py"])
    away = f"http://127.0.0.1:{servers.free_port()}"
    one = worker.Working(
        worker.AttemptClient(away, served.tokens["start"]), tmp_path / "work", away_s=0.1
    )
    with pytest.raises(worker.StoreError, match="refused"):
        one.run()
    # One that is told to end does not wait for it.
    two = worker.Working(worker.AttemptClient(away, served.tokens["start"]), tmp_path / "work2")
    two.preempted.set()
    with pytest.raises(worker.StoreError, match="refused"):
        two.run()


def test_one_that_is_over_is_told_so(
    served: Served, claimed: Callable[..., int], tmp_path: Path
) -> None:
    number = claimed({}, tmp_path, command=["python", "train.py"])
    with served.database.writing() as session:
        (running,) = attempts.running(session)
        attempts.lose(session, running.attempt, "not heard of")
    with pytest.raises(worker.Dismissed, match="over"):
        worker.Working(client(served), tmp_path / "work").run()
    assert state(served, number) == ("queued", "attempt 1 was lost: not heard of")


def test_one_whose_attempt_another_has_does_nothing(
    served: Served, claimed: Callable[..., int], tmp_path: Path
) -> None:
    number = claimed({}, tmp_path, command=["python", "train.py"])
    client(served).begin()
    with pytest.raises(worker.Dismissed, match="another has this attempt"):
        worker.Working(client(served), tmp_path / "work").run()
    assert not (tmp_path / "work").exists()
    (attempt,) = served.ask("GET", f"/api/jobs/{number}", "read").json["attempts"]
    assert (attempt["state"], "used a second time" in attempt["reason"]) == ("running", True)


def test_what_takes_too_long_is_ended(
    served: Served,
    claimed: Callable[..., int],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    script = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(1000)"
    command = ["python", "train.py"]
    number = claimed({"train.py": script}, tmp_path, command=command, options={"budget": "3s"})
    work = tmp_path_factory.mktemp("w")  # a socket's path has 107 characters
    one = worker.Working(client(served), work, starts_s=0.1)
    one.run()
    told, reason = state(served, number)
    assert told == "failed" and reason.startswith("ended after 6 s: twice its budget")
    pid = work / "code" / "pid"
    assert not pid.exists() or gone(int(pid.read_text()))


def test_others_on_the_gpu_are_noted(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker.Working(worker.AttemptClient(served.url, "adv_never-used"), tmp_path / "work")
    other, gone_by_now = os.getppid(), 2**22 + 1
    users = (os.getpid(), gone_by_now)
    monkeypatch.setattr(one, "_gpus", lambda: [Gpu(uuid="GPU-0", name="H100", users=users)])
    one._look_for_others()
    assert one._others == set()
    users = (*users, other)
    one._look_for_others()
    (noted,) = one._others
    assert noted.startswith(f"{other} (")


def test_what_was_found_is_one_line() -> None:
    found = record()
    advised = found.winner(found.use)
    assert worker._said(found) == f"record {found.id}: {spread(advised)} over torch's default"
    nothing = replace(
        found, winners=tuple(replace(one, choice=found.baseline) for one in found.winners)
    )
    assert worker._said(nothing).endswith(": nothing is clearly faster than torch's default")
    hasty = replace(nothing, raced=(), trials=())
    assert worker._said(hasty).endswith(": there is nothing to race beside torch's default")


def test_a_tuning_that_raced_nothing_is_not_done(
    served: Served, claimed: Callable[..., int], tmp_path: Path
) -> None:
    """Its record is kept all the same, and the same request is a new job."""
    claimed({"model.py": LAYERED}, tmp_path, **TARGET)
    (tmp_path / "work").mkdir()
    one = worker.Working(client(served), tmp_path / "work")
    one._server.begin()
    one._scratch.make()
    found = replace(record(), raced=(), trials=())
    Records(DirStore(one._scratch.cache)).put(found)
    ended = one._found(finished=False)
    assert (ended.state, ended.record) == ("failed", "") and "larger --budget" in ended.reason
    (held,) = Records(one._server.store).held(EVERYTHING)
    assert held.record.id == found.id
    assert one._found(finished=True).state == "done"


def test_a_study_that_was_not_heard_is_said_again(tmp_path: Path) -> None:
    scratch = worker.Scratch(tmp_path)
    scratch.make()
    (scratch.studies / "a.journal").write_bytes(b"whole\nhal")
    (scratch.studies / "b.journal").symlink_to(tmp_path)
    assert next(scratch.grown(False)) == ("a.journal", b"whole\n")
    assert list(scratch.grown(False)) == [("a.journal", b"whole\n")]
    assert list(scratch.grown(True)) == []


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    words = ["/bin/sh", "-c", "echo something; exit 3"]
    one = GuardedProcess(words, log=Path("/dev/full"), environment={})
    assert one.exit_report() == (3, "something")
    one.end()


def test_a_tail_keeps_both_ends_of_what_is_too_long(tmp_path: Path) -> None:
    file = tmp_path / "output"
    file.write_bytes(b"begin" + b"." * 1000 + b"end")
    tail = worker.Tail(file)
    assert tail.text(10) == "begin\n[advisor: 998 bytes of output are left out]\n..end"
    with file.open("ab") as more:
        more.write("é".encode())
    assert (tail.text(10), tail.text(10)) == ("é", "")
