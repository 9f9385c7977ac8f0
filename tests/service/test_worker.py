"""Tunings from submission to lookup, and the worker alone with a fake clock and a fake tuning."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select

import advisor as package
from advisor.cache.reader import EVERYTHING
from advisor.cache.record import CUT_SHORT, Record
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.cache.stores.dir import DirStore
from advisor.errors import StoreError
from advisor.jobs import code_archive, worker
from advisor.jobs.spec import AttemptOver
from advisor.report.text import spread
from advisor.service import attempts
from advisor.service.executors import Capacity
from advisor.service.executors.local import Local
from advisor.service.schema import Item
from advisor.tuners import host
from advisor.tuners.environment import Gpu
from advisor.tuners.measure.run.guarded_process import GuardedProcess
from tests.builders import verified
from tests.cache import servers
from tests.cache.examples import record
from tests.face.commands import LAYERED
from tests.forks import alive, started_with, until
from tests.service.clusters import FEW, Stack
from tests.service.serving import LiveServer, ask
from tests.service.test_jobs import cancel, job_of, log_of, put_code, submit
from tests.service.test_records import packed, put

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
MODEL = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, {outputs})
"""
EARLIER = "continuing an earlier tuning"
HANGS = """
import os, pathlib, subprocess, sys, time

daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(f"{daemon.pid} {os.getpid()} all")
time.sleep(1000)
"""


def workers(stack: Stack) -> list[int]:
    """Process ids of the local workers and all their descendants."""
    mark = Local(stack.database).name.rpartition(":")[2]
    running = filter(alive, started_with(f"/advisor-{mark}-"))
    return [one for pid in sorted(running) for one in host.family(pid)]


def all_gone(*pids: int) -> bool:
    return bool(until(lambda: not any(map(alive, pids))))


@pytest.fixture
def stack(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("team")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    running = Stack(folder)
    try:
        yield running
    finally:
        assert running.server.stop(signal.SIGTERM) == 0
        assert workers(running) == []


@pytest.mark.e2e
def test_a_model_is_tuned(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"model.py": MODEL.format(outputs=4)}
    number = stack.submit(files, target="model.py:Net", gpus=0, seed=1, **FEW)
    job = stack.until(number, lambda job: job.over)
    assert (job.state, len(job.attempts)) == ("done", 1), (job, stack.log(number))
    assert job.trials[0]["what"] == "torch's default" and job.trials[0]["batch"] == 8
    (found,) = job.attempts
    assert found["device"].endswith(": CPU") and found["reason"] == job.reason
    assert job.reason.startswith(f"record {job.record}: ")
    log = stack.log(number)
    assert "Net: " in log and tempfile.gettempdir() not in log  # temporary paths are removed
    monkeypatch.setenv("ADVISOR_TOKEN", stack.token)
    monkeypatch.setenv("ADVISOR_CACHE", stack.client.url)
    monkeypatch.chdir(tmp_path)  # another folder
    model = package.Model("model.py:Net", device="cpu")
    Path("model.py").write_text(files["model.py"])
    advice = package.lookup(model, shape="8x4")
    assert (advice.status, advice.record.id) == ("exact", job.record)
    Path("model.py").write_text(MODEL.format(outputs=5))
    with pytest.warns(package.AdvisorWarning, match="file another of this name"):
        assert package.lookup(model, shape="8x4").status == "miss"
    assert all_gone(*workers(stack))


@pytest.mark.long
def test_a_job_survives_killed_workers_and_servers(stack: Stack, tmp_path: Path) -> None:
    """Killed worker: the next one continues the search. Killed server: the worker carries on and is
    found again. Stopped server: the worker saves its state, and the job resumes after a restart."""
    gate = tmp_path / "gate"
    gate.touch()
    files, command = {"model.py": LAYERED, "train.py": SCRIPT}, ["python", "train.py", str(gate)]
    number = stack.submit(files, command=command, gpus=0, budget="10s", compile=False)
    first = stack.until(number, lambda job: len(job.trials) >= 2)
    gate.unlink()  # the next attempt waits until the server is back
    killed = workers(stack)
    for process in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert all_gone(*killed)

    stack.until(number, lambda job: len(job.attempts) == 2)
    stack.until(number, lambda job: job.attempts[1]["device"].endswith(": CPU"))
    second = workers(stack)
    assert stack.server.stop(signal.SIGKILL) == -signal.SIGKILL and alive(second[0])
    stack.start()
    gate.touch()
    stack.until(number, lambda _job: stack.log(number).count(EARLIER) == 1)
    assert second[0] in workers(stack) and len(stack.client.job(number).attempts) == 2

    assert stack.server.stop(signal.SIGTERM) == 0 and all_gone(*second)
    stack.start()
    job = stack.until(number, lambda job: job.over)
    assert job.state == "done" and job.record, (job, stack.log(number))
    assert [one["state"] for one in job.attempts] == ["lost", "preempted", "done"]
    log = stack.log(number)
    assert log.count(EARLIER) == 2 and "an epoch is over" in log
    events = ask(stack.port, "GET", "/api/audit", stack.token).json["events"]
    assert [one["action"] for one in events].count("job done") == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADVISOR_TOKEN", stack.token)
        (held,) = Records(open_store(stack.client.url)).held(EVERYTHING)
    tried = {trial.number for trial in held.record.trials}
    assert {one["number"] for one in first.trials} <= tried


@dataclass
class Tuning:
    """Replaces `advisor tune`: writes the given output and ends with the given code."""

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


class ClaimedJob:
    """A claimed job; `worker` makes a JobWorker that runs in this process."""

    def __init__(
        self, server: LiveServer, folder: Path, files: Mapping[str, str], **asked: Any
    ) -> None:
        self.server, self.folder = server, folder
        code = folder / "sent"
        code.mkdir()
        for name, text in files.items():
            (code / name).write_text(text)
        packed = code_archive.pack(code)
        assert put_code(server, packed.archive).status < 300
        command = ["python", "train.py"]
        self.asked = {"command": command, "archive": packed.digest, "gpus": 0} | asked
        self.again()

    def again(self) -> None:
        """Submit the job again with `force`, and claim it."""
        self.number = submit(self.server, **self.asked, force=True).json["id"]
        self.claim()

    def claim(self) -> None:
        with self.server.database.writing() as session:
            found = attempts.claim(session, "here", Capacity(gpu="", gpus=0))
        assert found is not None and found.job == self.number
        self.start = found

    def worker(self, url: str = "", folder: Path | None = None, **how: Any) -> worker.JobWorker:
        now = how.get("now", time.monotonic)
        client = worker.AttemptClient(url or self.server.url, self.start.token, now=now)
        work = folder or self.folder / f"work{self.start.attempt}"
        return worker.JobWorker(client, work, **how)

    @property
    def data(self) -> dict[str, Any]:
        return job_of(self.server, self.number)

    @property
    def state(self) -> tuple[str, str]:
        return self.data["state"], self.data["reason"]


@pytest.fixture
def job(sqlite_server: LiveServer, tmp_path: Path) -> ClaimedJob:
    return ClaimedJob(sqlite_server, tmp_path, {"train.py": "print(1)"})


TRIAL = {"number": 3, "what": "tf32", "samples_per_s": 9.5, "ratio": 1.5}


def test_a_worker_uploads_the_record_trials_log_and_studies(job: ClaimedJob) -> None:
    found = record()
    tuning = Tuning(record=found, events=[TRIAL], log="é" * 2**16, studies={"a.journal": b"1\n2"})
    job.worker(start=tuning).run()
    last, advised = job.data, found.winner(found.use)
    assert last["state"] == "done" and last["record"] == found.id
    assert last["reason"] == f"record {found.id}: {spread(advised)} over torch's default"
    assert [one["what"] for one in last["trials"]] == ["tf32"]
    assert last["attempts"][0]["device"].endswith(": CPU")
    log = log_of(job.server, job.number)["text"]
    left_out = r"\[advisor: 65536 bytes of output are left out\]"
    assert re.fullmatch(rf"é+\ufffd?\n{left_out}\n\ufffd?é+", log)
    (words,) = tuning.started
    assert words[-4:] == ["--show-output", "--", "python", "train.py"]
    assert (tuning.folder / "train.py").read_text() == "print(1)"
    assert not [name for name in tuning.environment if name == "ADVISOR_START_TOKEN"]


FOUND = record()
SLOWER = replace(FOUND, winners=tuple(replace(one, choice=FOUND.baseline) for one in FOUND.winners))
ALONE = replace(SLOWER, raced=(), trials=())


def test_the_job_state_follows_the_end_of_the_tuning(job: ClaimedJob, tmp_path: Path) -> None:
    for tuning, state, reason in (
        (Tuning(record=SLOWER), "done", ": nothing is clearly faster than torch's default$"),
        (Tuning(record=ALONE), "done", ": there is nothing to compare with torch's default$"),
        (Tuning(record=ALONE, code=3), "failed", "^record .*: its budget .* a larger --budget$"),
        (Tuning(), "failed", "^advisor tune ended, and left no record$"),
        (Tuning(code=1, words="advisor: no data\x07"), "failed", r"^no data\?$"),
        (Tuning(code=-9), "failed", "^signal SIGKILL: it printed nothing$"),
        (Tuning(hangs=True), "failed", "^ended after 2400 s: twice its budget, and 1800 s to st"),
    ):
        ticks = itertools.count(0.0, 1200.0)
        job.worker(start=tuning, now=lambda ticks=ticks: next(ticks)).run()
        found, why = job.state
        assert found == state and re.search(reason, why), why
        with job.server.database.writing() as session:  # stored even if the job failed
            assert session.execute(delete(Item)).rowcount == (tuning.record is not None)
        job.again()
    (tmp_path / "file").touch()
    job.worker(folder=tmp_path / "file" / "work").run()
    state, reason = job.state
    assert state == "failed" and reason.endswith(f"{tmp_path}/file/work: File exists")


def test_the_next_attempt_continues_the_search(job: ClaimedJob) -> None:
    one = job.worker(start=Tuning(hangs=True, studies={"a.journal": b"whole\nhal"}))
    one._server.preempted.set()
    one.run()
    assert job.state == ("preempted", "its worker was told to end")
    job.claim()
    next_one = Tuning(record=FOUND)
    job.worker(start=next_one).run()
    assert next_one.seen == {"a.journal": b"whole\n"} and job.state[0] == "done"


def test_a_lost_server_ends_the_worker(job: ClaimedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "HEARTBEAT_S", 0.0)
    away = f"http://127.0.0.1:{servers.free_port()}"
    ticks = itertools.count(0.0, worker.SERVER_TIMEOUT_S)
    waits, ends = job.worker(away, now=lambda: next(ticks)), job.worker(away)
    ends._server.preempted.set()  # a preempted worker does not wait
    for one in (waits, ends):
        with pytest.raises(StoreError, match="refused"):
            one.run()


def test_a_worker_exits_if_its_attempt_is_taken_or_over(job: ClaimedJob, tmp_path: Path) -> None:
    job.worker()._server.begin()
    with pytest.raises(AttemptOver, match="another worker has this attempt"):
        job.worker(folder=tmp_path / "work").run()
    assert not (tmp_path / "work").exists()
    (attempt,) = job.data["attempts"]
    assert (attempt["state"], "used a second time" in attempt["reason"]) == ("running", True)
    with job.server.database.writing() as session:
        attempts.end(session, job.start.attempt, "lost", "not heard of")
    with pytest.raises(AttemptOver, match="over"):
        job.worker().run()
    assert job.state[0] == "queued"


def test_an_uncertain_record_does_not_replace_a_clear_one(job: ClaimedJob) -> None:
    """The job reports that the earlier record stays; a direct upload is still stored."""
    clear = replace(FOUND, trials=(*FOUND.trials, verified(FOUND.winner(FOUND.use).config)))
    cut = replace(clear.provenance, effort=CUT_SHORT, created=clear.provenance.created + 1)
    short = replace(clear, provenance=cut)
    job.worker(start=Tuning(record=short)).run()
    assert job.state[0] == "done"
    with job.server.database.writing() as session:
        session.execute(delete(Item))
    for kept, state in ((clear, "done"), (short, "failed")):
        job.again()
        job.worker(start=Tuning(record=kept)).run()
        assert job.state[0] == state, job.state
    assert "too noisy to tell: the earlier record stays in use" in job.state[1]
    with job.server.database.reading() as session:
        assert session.scalars(select(Item.created)).all() == [clear.provenance.created]
    put(job.server, *packed(short))
    with job.server.database.reading() as session:
        assert len(session.scalars(select(Item.key)).all()) == 2


def test_cancelling_kills_the_whole_command(sqlite_server: LiveServer, tmp_path: Path) -> None:
    job = ClaimedJob(sqlite_server, tmp_path, {"hangs.py": HANGS}, command=["python", "hangs.py"])
    pids = tmp_path / "pids"

    def start(_words: list[str], **how: Any) -> GuardedProcess:
        found = GuardedProcess([sys.executable, "hangs.py", str(pids)], **how)
        until(lambda: pids.exists() and "all" in pids.read_text())
        assert cancel(sqlite_server, job.number).json == {"state": "cancelled"}
        return found

    with pytest.raises(AttemptOver):
        job.worker(start=start).run()
    assert all_gone(*map(int, pids.read_text().split()[:2]))


def test_other_gpu_processes_are_noted(job: ClaimedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    one, gone_by_now = job.worker(), 2**22 + 1
    for others in ((), (os.getppid(),)):
        users = (os.getpid(), gone_by_now, *others)
        gpus = [Gpu(uuid="GPU-0", name="H100", users=users)]
        monkeypatch.setattr(one, "_gpus", lambda gpus=gpus: gpus)
        one._note_other_processes()
        noted = [line.split(" (")[0] for line in one._other_processes]
        assert noted == [f"{other}" for other in others]


def test_a_failed_study_upload_is_retried_once_the_server_is_back(job: ClaimedJob) -> None:
    one = job.worker()
    one._prepare(one._server.begin())
    (one._studies / "a.journal").write_bytes(b"whole\n")
    (one._studies / "b.journal").symlink_to(one._folder)
    back, one._server = one._server, job.worker(f"http://127.0.0.1:{servers.free_port()}")._server
    with pytest.raises(StoreError):
        one._upload_studies()
    away, one._server = one._server, back
    one._upload_studies()
    assert back.get("attempt/studies/a.journal") == b"whole\n"
    one._server = away  # an uploaded study is not sent again
    one._upload_studies()
