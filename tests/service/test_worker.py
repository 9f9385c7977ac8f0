"""A tuning from where it is submitted to where it is found; and its worker, with a given clock and
a given runner in place of `advisor tune`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

import advisor as package
from advisor.cache.reader import EVERYTHING
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.cache.stores.dir import DirStore
from advisor.client import Client
from advisor.client import Job as JobSeen
from advisor.errors import StoreError
from advisor.jobs import code_archive, worker
from advisor.report.text import spread
from advisor.service import attempts
from advisor.service.executors import Capacity
from advisor.service.executors.local import Local
from advisor.service.schema import Item
from advisor.tuners import host
from advisor.tuners.environment import Gpu
from advisor.tuners.measure.run.guarded_process import GuardedProcess
from tests.cache import servers
from tests.cache.examples import record
from tests.face.commands import LAYERED, SHAPE
from tests.service.serving import Served, ask, fresh, serving, wait_until
from tests.service.test_serve import Process

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
while True:
    os.write(1, b"x" * 65535 + b"\\n")
"""


class Team:
    """A server that may be killed and started again, and someone who submits."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, servers.free_port()
        self.token = ""
        self.start()

    def start(self) -> None:
        words = ("--database", f"sqlite:///{self.folder}/service.db", "--port", str(self.port))
        self.server = Process(*words, program=("-c", SERVE))
        self.token = self.token or self.server.token
        self.client = Client(f"http://127.0.0.1:{self.port}?timeout=20s", self.token)

    def submit(self, files: Mapping[str, str], **asked: Any) -> int:
        code = self.folder / "code"
        code.mkdir()
        for name, text in files.items():
            (code / name).write_text(text)
        return self.client.submit(folder=code, **asked).id

    def log(self, number: int) -> str:
        return "".join(self.client.log(number))

    def until(self, number: int, there: Callable[[JobSeen], bool]) -> JobSeen:
        limit = time.monotonic() + 200
        while not there(job := self.client.job(number)):
            assert time.monotonic() < limit and not job.over, (job, self.log(number)[-2000:])
            time.sleep(0.1)
        return job

    @property
    def workers(self) -> list[int]:
        """The processes of attempts, each with all that it started."""
        mark = Local(f"sqlite:///{self.folder}/service.db").name.rpartition(":")[2]
        lines = {path.parent.name: path for path in Path("/proc").glob("[0-9]*/cmdline")}
        found = []
        for pid, line in lines.items():
            with contextlib.suppress(OSError):  # it is over
                if f"/advisor-{mark}-".encode() in line.read_bytes() and alive(int(pid)):
                    found.append(int(pid))
        return [one for pid in sorted(found) for one in host.family(pid)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(*pids: int) -> bool:
    wait_until(lambda: not any(map(alive, pids)))
    return True


@pytest.fixture
def team(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Team]:
    folder = tmp_path_factory.mktemp("team")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    team = Team(folder)
    try:
        yield team
    finally:
        assert team.server.stop(signal.SIGTERM) == 0
        assert team.workers == []


def test_a_model_is_tuned_and_found_by_others(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"batches": "4", "compile": False, "seed": 1, "trials": 2}  # however slow the host is
    options = few | {"budget": "30s", "effort": "quick"}
    files = {"model.py": LAYERED}
    number = team.submit(files, target="model.py:Net", shape=[SHAPE], gpus=0, **options)
    job = team.until(number, lambda job: job.over)
    assert (job.state, len(job.attempts)) == ("done", 1), (job, team.log(number))
    assert job.trials[0]["what"] == "torch default" and job.trials[0]["ratio"] == 1
    assert {one["batch"] for one in job.trials} == {4}
    (found,) = job.attempts
    assert found["device"].endswith(": CPU") and found["reason"] == job.reason
    assert job.reason.startswith(f"record {job.record}: ")
    log = team.log(number)
    assert "Net: " in log and "trial 0:" in log
    assert tempfile.gettempdir() not in log  # what lay there is gone
    monkeypatch.setenv("ADVISOR_TOKEN", team.token)
    monkeypatch.setenv("ADVISOR_CACHE", team.client.url)
    (held,) = Records(open_store(team.client.url)).held(EVERYTHING)
    tried = [one for one in held.record.trials if one.stage == "compute"]
    assert (held.record.id, len(tried)) == (job.record, len(job.trials))
    # From elsewhere, with the same code, and by the line that its log ends with.
    (tmp_path / "model.py").write_text(LAYERED)
    monkeypatch.chdir(tmp_path)
    _, _, lines = log.partition("In your script, with ADVISOR_CACHE=")
    url, line, *_ = lines.splitlines()
    assert url == f"http://127.0.0.1:{team.port}:" and "dir:" not in log
    asked = line.strip().removeprefix("advice = ").replace(".apply(", ".lookup(")
    advice = eval(asked, {"advisor": package})
    assert (advice.status, advice.record.id) == ("exact", job.record)
    (tmp_path / "model.py").write_text(LAYERED.replace("0.015", "0.020"))
    with pytest.warns(package.AdvisorWarning, match="file another of this name"):
        model = package.Model("model.py:Net", device="cpu")
        assert package.lookup(model, shape=SHAPE).status == "miss"
    assert gone(*team.workers)


@pytest.mark.long
def test_a_script_as_it_is_comes_through_bad_luck(team: Team, tmp_path: Path) -> None:
    """Its worker is killed with all that it started: another one goes on with what was tried. Its
    server is killed: the worker goes on, and is found again. Its server is told to stop: the worker
    saves what it has, and the job goes on when the server is back. It is done once."""
    gate = tmp_path / "gate"
    gate.touch()
    files, command = {"model.py": LAYERED, "train.py": SCRIPT}, ["python", "train.py", str(gate)]
    number = team.submit(files, command=command, gpus=0, budget="10s", compile=False)
    first = team.until(number, lambda job: len(job.trials) >= 2)
    gate.unlink()  # the next one waits for the server, which takes a while to be back
    killed = team.workers
    for process in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert gone(*killed)

    team.until(number, lambda job: len(job.attempts) == 2)
    team.until(number, lambda job: job.attempts[1]["device"].endswith(": CPU"))
    second = team.workers
    assert team.server.stop(signal.SIGKILL) == -signal.SIGKILL and alive(second[0])
    team.start()
    gate.touch()
    team.until(number, lambda _job: team.log(number).count(EARLIER) == 1)
    assert second[0] in team.workers and len(team.client.job(number).attempts) == 2

    assert team.server.stop(signal.SIGTERM) == 0 and gone(*second)
    team.start()
    job = team.until(number, lambda job: job.over)
    assert job.state == "done" and job.record, (job, team.log(number))
    assert [one["state"] for one in job.attempts] == ["lost", "preempted", "done"]
    log = team.log(number)
    assert log.count(EARLIER) == 2 and "an epoch is over" in log
    events = ask(team.port, "GET", "/api/audit", team.token).json["events"]
    assert [one["action"] for one in events].count("job done") == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADVISOR_TOKEN", team.token)
        (held,) = Records(open_store(team.client.url)).held(EVERYTHING)
    tried = {trial.number for trial in held.record.trials}
    assert {one["number"] for one in first.trials} <= tried


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that starts nothing: workers run in the test's own process."""
    with serving(f"sqlite:///{tmp_path_factory.mktemp('database')}/service.db") as found:
        yield found


@dataclass
class Tuning:
    """A runner in place of `advisor tune`: what the tuning leaves, and how it ends."""

    code: int = 0
    words: str = ""
    record: Record | None = None
    events: Sequence[Mapping[str, Any]] = ()
    log: str = ""
    studies: Mapping[str, bytes] = field(default_factory=dict)
    hangs: bool = False
    started: list[list[str]] = field(default_factory=list)
    seen: dict[str, bytes] = field(default_factory=dict)

    def __call__(self, words: list[str], *, log: Path, **how: Any) -> Tuning:
        self.started.append(words)
        self.environment, self.folder = how["environment"], how["folder"]
        cache = Path(words[words.index("--cache") + 1].removeprefix("dir:"))
        self.seen = {one.name: one.read_bytes() for one in (cache / "studies").iterdir()}
        for name, data in self.studies.items():
            (cache / "studies" / name).write_bytes(data)
        lines = [json.dumps(event) + "\n" for event in self.events]
        Path(words[words.index("--events") + 1]).write_text("".join(lines))
        log.write_text(self.log)
        if self.record is not None:
            Records(DirStore(cache)).put(self.record)
        return self

    @property
    def ended(self) -> bool:
        return not self.hangs

    def exit_report(self) -> tuple[int, str]:
        return self.code, self.words

    def end(self) -> None:
        pass


class Job:
    """A claimed job, whose workers run here."""

    def __init__(
        self, served: Served, folder: Path, files: Mapping[str, str], **asked: Any
    ) -> None:
        fresh(served)
        self.served, self.folder = served, folder
        code = folder / "sent"
        code.mkdir()
        for name, text in files.items():
            (code / name).write_text(text)
        packed = code_archive.pack(code)
        path = f"/api/archives/{packed.digest}"
        assert served.ask("PUT", path, "submit", packed.archive).status < 300
        asked = {"command": ["python", "train.py"], "archive": packed.digest, "gpus": 0} | asked
        self.number = served.ask("POST", "/api/jobs", "submit", asked).json["id"]
        self.claim()

    def claim(self) -> None:
        with self.served.database.writing() as session:
            found = attempts.claim(session, "here", Capacity(gpu="", gpus=0))
        assert found is not None and found.job == self.number
        self.start = found

    def worker(self, url: str = "", folder: Path | None = None, **how: Any) -> worker.Worker:
        now = how.get("now", time.monotonic)
        client = worker.AttemptClient(url or self.served.url, self.start.token, now=now)
        work = folder or self.folder / f"work{self.start.number}"
        return worker.Worker(client, work, **how)

    @property
    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = self.served.ask("GET", f"/api/jobs/{self.number}", "read").json
        return found

    @property
    def state(self) -> tuple[str, str]:
        return self.told["state"], self.told["reason"]


@pytest.fixture
def job(served: Served, tmp_path: Path) -> Job:
    return Job(served, tmp_path, {"train.py": "print(1)"})


TRIAL = {"number": 3, "what": "tf32", "samples_per_s": 9.5, "ratio": 1.5}


def test_a_worker_sends_all_that_a_tuning_leaves(job: Job) -> None:
    found = record()
    tuning = Tuning(record=found, events=[TRIAL], log="x" * 2**17, studies={"a.journal": b"1\n2"})
    job.worker(start=tuning).run()
    told = job.told
    advised = found.winner(found.use)
    assert told["state"] == "done" and told["record"] == found.id
    assert told["reason"] == f"record {found.id}: {spread(advised)} over torch's default"
    assert [one["what"] for one in told["trials"]] == ["tf32"]
    assert told["attempts"][0]["device"].endswith(": CPU")
    log = job.served.ask("GET", f"/api/jobs/{job.number}/log", "read").json["text"]
    assert log.count("bytes of output are left out") == 1
    (words,) = tuning.started
    assert words[-4:] == ["--show-output", "--", "python", "train.py"]
    assert (tuning.folder / "train.py").read_text() == "print(1)"
    assert not [name for name in tuning.environment if name == "ADVISOR_START_TOKEN"]


FOUND = record()
SLOWER = replace(FOUND, winners=tuple(replace(one, choice=FOUND.baseline) for one in FOUND.winners))
ALONE = replace(SLOWER, raced=(), trials=())


@pytest.mark.parametrize(
    ("tuning", "state", "reason"),
    [
        (Tuning(record=SLOWER), "done", ": nothing is clearly faster than torch's default$"),
        (Tuning(record=ALONE), "done", ": there is nothing to race beside torch's default$"),
        (Tuning(record=ALONE, code=3), "failed", "^record .*: its budget .* a larger --budget$"),
        (Tuning(), "failed", "^advisor tune ended, and left no record$"),
        (Tuning(code=1, words="advisor: no data\x07"), "failed", r"^no data\?$"),
        (Tuning(code=-9), "failed", "^signal SIGKILL: it printed nothing$"),
        (
            Tuning(hangs=True),
            "failed",
            "^ended after 2400 s: twice its budget, and 1800 s to start",
        ),
    ],
)
def test_how_a_tuning_ends(job: Job, tuning: Tuning, state: str, reason: str) -> None:
    ticks = itertools.count(0.0, 1200.0)
    one = job.worker(start=tuning, now=lambda: next(ticks))
    one.run()
    found, why = job.state
    assert found == state and re.search(reason, why), why
    with job.served.database.reading() as session:  # kept, whatever became of the job
        assert bool(session.scalar(select(Item.key))) == (tuning.record is not None)


def test_the_next_attempt_goes_on_with_the_search(job: Job) -> None:
    one = job.worker(start=Tuning(hangs=True, studies={"a.journal": b"whole\nhal"}))
    one._server.preempted.set()
    one.run()
    assert job.state == ("preempted", "its worker was told to end")
    job.claim()
    next_one = Tuning(record=FOUND)
    job.worker(start=next_one).run()
    assert next_one.seen == {"a.journal": b"whole\n"} and job.state[0] == "done"


def test_a_machine_that_fails_is_one_clear_reason(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job.worker(folder=tmp_path / "file" / "work").run()
    state, reason = job.state
    assert state == "failed" and reason.endswith(f"{tmp_path}/file/work: File exists")


def test_a_server_that_does_not_come_back(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BEAT_S", 0.0)
    away, ticks = f"http://127.0.0.1:{servers.free_port()}", itertools.count(0.0, worker.AWAY_S)
    with pytest.raises(StoreError, match="refused"):
        job.worker(away, now=lambda: next(ticks)).run()
    # One that is told to end does not wait for it.
    two = job.worker(away)
    two._server.preempted.set()
    with pytest.raises(StoreError, match="refused"):
        two.run()


def test_one_that_is_over_is_told_so(job: Job) -> None:
    with job.served.database.writing() as session:
        attempts.end(session, job.start.attempt, "lost", "not heard of")
    with pytest.raises(worker.AttemptOver, match="over"):
        job.worker().run()
    assert job.state == ("queued", "attempt 1 was lost: not heard of")


def test_one_whose_attempt_another_has_does_nothing(job: Job, tmp_path: Path) -> None:
    job.worker()._server.begin()
    with pytest.raises(worker.AttemptOver, match="another has this attempt"):
        job.worker(folder=tmp_path / "work").run()
    assert not (tmp_path / "work").exists()
    (attempt,) = job.told["attempts"]
    assert (attempt["state"], "used a second time" in attempt["reason"]) == ("running", True)


def test_what_is_cancelled_leaves_nothing(served: Served, tmp_path: Path) -> None:
    """Of a command that prints without end, never trains, and has a daemon."""
    job = Job(served, tmp_path, {"hangs.py": HANGS}, command=["python", "hangs.py"])
    daemon, hangs = tmp_path / "daemon", tmp_path / "hangs"

    def start(_words: list[str], **how: Any) -> GuardedProcess:
        found = GuardedProcess([sys.executable, "hangs.py", str(tmp_path)], **how)
        wait_until(lambda: daemon.exists() and hangs.exists())
        cancelled = served.ask("POST", f"/api/jobs/{job.number}/cancel", "submit")
        assert cancelled.json == {"state": "cancelled"}
        return found

    with pytest.raises(worker.AttemptOver):
        job.worker(start=start).run()
    assert gone(int(daemon.read_text()), int(hangs.read_text()))


def test_others_on_the_gpu_are_noted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    one = job.worker()
    other, gone_by_now = os.getppid(), 2**22 + 1
    users = (os.getpid(), gone_by_now)
    monkeypatch.setattr(one, "_gpus", lambda: [Gpu(uuid="GPU-0", name="H100", users=users)])
    one._look_for_others()
    assert one._others == set()
    users = (*users, other)
    one._look_for_others()
    (noted,) = one._others
    assert noted.startswith(f"{other} (")


def test_a_study_that_did_not_arrive_is_sent_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_words: object) -> bytes:
        raise StoreError("away")

    one = job.worker()
    one._server.begin()
    one._prepare()
    (one._studies / "a.journal").write_bytes(b"whole\n")
    (one._studies / "b.journal").symlink_to(one._folder)
    with monkeypatch.context() as away, pytest.raises(StoreError):
        away.setattr(one._server, "ask", refuse)
        one._save()
    one._save()
    assert one._server.get("attempt/studies/a.journal") == b"whole\n"
    sent: list[object] = []
    monkeypatch.setattr(one._server, "ask", lambda *words: sent.append(words))
    one._save()
    assert sent == []


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    words = ["/bin/sh", "-c", "echo something; exit 3"]
    one = GuardedProcess(words, log=Path("/dev/full"), environment={})
    assert one.exit_report() == (3, "something")
    one.end()


def test_a_tail_keeps_both_ends_of_what_is_too_long(tmp_path: Path) -> None:
    file = tmp_path / "output"
    file.write_bytes(b"begin" + b"." * 1000 + b"end")
    tail = worker.FileTail(file)
    assert tail.text(10) == "begin\n[advisor: 998 bytes of output are left out]\n..end"
    with file.open("ab") as more:
        more.write("é".encode())
    assert (tail.text(10), tail.text(10)) == ("é", "")
