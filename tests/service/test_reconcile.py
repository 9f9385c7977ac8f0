"""The reconciler: it starts queued jobs, detects lost attempts, and explains why jobs wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from fastapi import HTTPException

from advisor.cache.records import Records
from advisor.cache.signing import NO_KEYS
from advisor.jobs.spec import JobSpec
from advisor.open_store import refusal
from advisor.service import attempts, jobs
from advisor.service.access import Service
from advisor.service.attempts import LEASE_S, MAX_LOST, OVERTAKE_S
from advisor.service.database import Database
from advisor.service.executors import Capacity, Executor, ExecutorAway, Start, Status, Unplaceable
from advisor.service.loop import LATE_PERIODS, Loop
from advisor.service.reconcile import ASKS_S, EVERY_S, SILENT_S, Reconciler
from advisor.service.routes.admin import healthz, readyz
from advisor.service.schema import Attempt, JobRow
from tests.cache.servers import free_port
from tests.service.serving import LiveServer, caller
from tests.service.test_jobs import cancel, job_of, set_rows, states

HERE = "http://127.0.0.1:1"


def without_digest(*external: str) -> list[str]:
    """External names without their last part, which differs between databases."""
    return [one.rpartition("-")[0] for one in external]


class FakeExecutor:
    """An executor with `gpus` H100s and a CPU.

    Attributes:
        states: the status of each started attempt; `started` lists the attempts in order.
        away, full: if set, all calls raise ExecutorAway, or `start` raises Unplaceable.
        silent: if set, `start` records an ended attempt and raises ExecutorAway.
    """

    def __init__(self, name: str = "fake", gpus: int = 0) -> None:
        self.name, self._gpus, self.asked = name, gpus, 0
        self.states: dict[str, Status] = {}
        self.started: list[Start] = []
        self.stopped: list[str] = []
        self.away = self.full = self.silent = ""

    def capacity(self) -> Sequence[Capacity]:
        self._answer()
        self.asked += 1
        running = [one for one in self.started if self.states[one.external].state == "running"]
        free = self._gpus - sum(one.asked.gpus for one in running)
        why = "" if free else "used"
        found = [Capacity(gpu="NVIDIA H100", gpus=free, total=self._gpus, why=why)]
        cpu = [Capacity(gpu="", gpus=0)] * all(one.asked.gpus for one in running)
        return found * bool(self._gpus) + cpu

    def start(self, start: Start) -> None:
        self._answer()
        if self.full:
            raise Unplaceable(self.full)
        self.started.append(start)
        self.states[start.external] = Status(state="running")
        if self.silent:
            self.states[start.external] = Status(state="ended", reason="refused")
            raise ExecutorAway(self.silent)

    def status(self, external: Sequence[str]) -> Mapping[str, Status]:
        self._answer()
        return {one: self.states.get(one, Status(state="unknown")) for one in external}

    def stop(self, external: str) -> None:
        self.stopped.append(external)
        self.states[external] = Status(state="ended", reason="stopped")

    def close(self) -> None: ...

    @property
    def names(self) -> list[str]:
        return without_digest(*(one.external for one in self.started))

    def _answer(self) -> None:
        if self.away:
            raise ExecutorAway(self.away)


_: type[Executor] = FakeExecutor


class Harness:
    """Submits jobs to a server and makes reconcilers that share the fake clock `now`."""

    def __init__(self, server: LiveServer) -> None:
        self.server, self.database, self.now = server, server.database, 1000.0
        self._me = caller(server, "submit")

    def reconciler(self, *executors: Executor) -> Reconciler:
        return Reconciler(self.database, executors, HERE, now=lambda: self.now)

    def submit(self, *words: str, **asked: Any) -> int:
        """Submit straight to the database: the server adds no reason to wait."""
        wanted = JobSpec(command=("python", *(words or ("train.py",))), **asked)
        with self.database.writing() as session:
            return jobs.submit(session, wanted, self._me)[0].id

    def job(self, number: int) -> tuple[str, str]:
        job = job_of(self.server, number)
        return job["state"], job["reason"]

    def states(self, *numbers: int) -> list[str]:
        return [self.job(number)[0] for number in numbers]

    def attempts(self, number: int) -> list[str]:
        return states(self.server, number)[1]


@pytest.fixture
def harness(server: LiveServer) -> Harness:
    return Harness(server)


@pytest.fixture
def sqlite_harness(sqlite_server: LiveServer) -> Harness:
    return Harness(sqlite_server)


def test_queued_jobs_start_in_order_where_capacity_is_free(harness: Harness) -> None:
    fake = FakeExecutor(gpus=2)
    reconciler = harness.reconciler(fake)
    one, two, three, cpu = (harness.submit(f"{n}.py", gpus=n % 3) for n in (1, 4, 2, 3))
    reconciler.turn()
    assert [start.asked.gpus for start in fake.started] == [1, 1, 0]
    assert harness.states(one, two, three, cpu) == ["running", "running", "queued", "running"]
    assert harness.job(three) == ("queued", "waits for 2 GPUs of NVIDIA H100: 0 free (used)")
    first = fake.started[0]
    assert fake.names[0] == f"advisor-{one}-1"
    assert (first.server_url, first.token[:4]) == (HERE, "adv_")
    for start in fake.started[:2]:
        fake.states[start.external] = Status(state="preempted", reason="the node goes")
    reconciler.turn()
    # The oldest jobs start first, although the two-GPU job would fit too.
    assert fake.names[3:] == [f"advisor-{one}-2", f"advisor-{two}-2"]
    assert harness.attempts(one) == ["preempted", "running"]


def test_an_unplaceable_job_says_what_is_missing(sqlite_harness: Harness) -> None:
    team, fake = sqlite_harness, FakeExecutor(gpus=1)
    reconciler = team.reconciler(fake)
    other, many = team.submit("a", gpu="B200"), team.submit("b", gpus=4)
    reconciler.turn()
    assert fake.started == []
    why = "no known machine has a GPU named 'B200' (known: NVIDIA H100, the CPU); the job waits"
    assert team.job(other) == ("queued", why)
    assert team.job(many) == ("queued", "waits for 4 GPUs of NVIDIA H100: 1 free")
    # A server with less information keeps the reason that another one gave.
    for server in (team.reconciler(FakeExecutor("other")), team.reconciler()):
        server.turn()
        assert team.job(many)[1].startswith("waits for 4 GPUs")
    alone = team.submit("none")
    team.reconciler().turn()
    assert team.job(alone)[1] == "no known machine has a GPU (known: none); the job waits"
    cancel(team.server, alone)
    fake.full = "another was quicker"
    refused = team.submit("c")
    reconciler.turn()
    state, why = team.job(refused)
    assert (state, why.partition(": ")[2], team.attempts(refused)) == ("queued", fake.full, [])


def test_machines_are_listed_without_queued_jobs(sqlite_harness: Harness) -> None:
    """Capacities are queried at most every ASKS_S seconds."""
    team, fake = sqlite_harness, FakeExecutor(gpus=1)
    reconciler = team.reconciler(fake)
    for _ in range(3):
        reconciler.turn()
    (machine,) = reconciler.machines.values()
    assert [one.gpu for one in machine.devices] == ["NVIDIA H100", "CPU"] and fake.asked == 1
    team.now += ASKS_S
    fake.away = "connection refused"
    reconciler.turn()
    assert reconciler.machines["fake"].why == "connection refused"


def test_a_large_job_is_not_overtaken_forever(harness: Harness) -> None:
    fake = FakeExecutor(gpus=4)
    reconciler = harness.reconciler(fake)
    first, large = harness.submit("first"), harness.submit("large", gpus=4)
    never, after = harness.submit("never", gpus=5), harness.submit("after")
    reconciler.turn()
    assert harness.states(first, large, after) == ["running", "queued", "running"]
    set_rows(harness.server, JobRow, changed=JobRow.changed - OVERTAKE_S)
    later = [harness.submit("later", gpu="H100"), harness.submit("B200", gpu="B200")]
    cpu = harness.submit("cpu", gpus=0)
    reconciler.turn()
    assert harness.job(later[0]) == ("queued", f"lets job {large} go first")
    assert harness.job(large) == ("queued", "waits for 4 GPUs of NVIDIA H100: 2 free")
    assert "no known machine has" in harness.job(later[1])[1] and harness.states(cpu) == ["running"]
    fake.states = dict.fromkeys(fake.states, Status(state="preempted", reason="over"))
    for number in (first, after):
        cancel(harness.server, number)
    reconciler.turn()
    assert harness.states(large, later[0]) == ["running", "queued"]
    cancel(harness.server, large)
    reconciler.turn()
    assert harness.states(later[0], never) == ["running", "queued"]


def test_one_node_is_kept_free_for_a_large_job(sqlite_harness: Harness) -> None:
    class Nodes(FakeExecutor):
        def capacity(self) -> Sequence[Capacity]:
            left = 2 - len(self.started)
            return [Capacity(gpu="H100", gpus=2, total=4), Capacity(gpu="H100", gpus=left, total=4)]

    team = sqlite_harness
    team.submit("large", gpus=4)
    set_rows(team.server, JobRow, changed=JobRow.changed - OVERTAKE_S)
    small = [team.submit(str(n)) for n in range(3)]
    team.reconciler(Nodes()).turn()
    assert team.states(*small) == ["running", "running", "queued"]


def test_attempt_states_follow_the_executor(sqlite_harness: Harness) -> None:
    """An ended attempt without a result is retried; cancelling a job stops its attempt; nothing
    changes while the executor is unreachable."""
    team, fake, other = sqlite_harness, FakeExecutor(), FakeExecutor("other")
    reconciler = team.reconciler(fake)
    number = team.submit(gpus=0)
    for status in (Status(state="ended"), Status(state="ended", reason="node 1 burnt")):
        reconciler.turn()
        fake.states[fake.started[-1].external] = status
    reconciler.turn()
    assert team.attempts(number) == ["lost", "lost", "running"]
    fake.away = "connection refused"
    later = team.submit("later", gpus=0)
    team.reconciler(fake, other).turn()
    assert team.attempts(number)[-1] == "running" and other.names == [f"advisor-{later}-1"]
    fake.away = ""
    cancel(team.server, number)
    reconciler.turn()
    assert without_digest(*fake.stopped)[-1] == f"advisor-{number}-3"
    assert team.attempts(number)[-1] == "running"
    reconciler.turn()
    assert (team.states(number), team.attempts(number)[-1]) == (["cancelled"], "cancelled")


@pytest.mark.parametrize(
    ("place", "limit_s"),
    [
        ("seen", SILENT_S),
        # The server was killed between claiming and starting the attempt.
        ("unknown", LEASE_S),
        ("elsewhere", LEASE_S),
    ],
)
def test_a_silent_attempt_is_lost_in_time(harness: Harness, place: str, limit_s: float) -> None:
    """Time without a running reconciler does not count: workers could not report then."""
    fake = FakeExecutor()
    number = harness.submit(gpus=0)
    if place == "unknown":
        with harness.database.writing() as session:
            attempts.claim(session, "fake", Capacity(gpu="", gpus=0))
    else:
        harness.reconciler(fake if place == "seen" else FakeExecutor("other")).turn()
    again = harness.reconciler(fake)
    for _ in range(4):  # its last heartbeat is recent
        again.turn()
        harness.now += LEASE_S / 3
    assert harness.attempts(number) == ["running"]
    set_rows(harness.server, Attempt, beat=Attempt.beat - limit_s - 1)  # no more heartbeats
    harness.now += 1000  # the server was suspended
    again.turn()
    assert place == "unknown" or harness.attempts(number) == ["running"]
    for _ in range(5):
        harness.now += LEASE_S / 3
        again.turn()
    assert harness.attempts(number) == ["lost", "running"]


def test_a_start_that_the_executor_did_not_confirm_is_undone(harness: Harness) -> None:
    """After a timeout nobody knows whether the executor started the attempt."""
    fake = FakeExecutor()
    number = harness.submit(gpus=0)
    fake.silent = "the head timed out"
    for _ in range(MAX_LOST + 1):
        harness.reconciler(fake).turn()
        assert harness.job(number)[1].endswith(f"executor fake: {fake.silent}")
        assert harness.attempts(number) == []
        set_rows(harness.server, JobRow, due=0.0)
    fake.silent = ""
    harness.reconciler(fake).turn()
    assert harness.states(number) == harness.attempts(number) == ["running"]
    assert len(fake.started) == MAX_LOST + 2


def test_a_database_outage_is_logged_once(
    sqlite_harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    away = Database(f"postgresql+psycopg://me@127.0.0.1:{free_port()}/x")
    reconciler = Reconciler(away, [FakeExecutor()], HERE)
    loop = Loop("reconciler", EVERY_S, reconciler.turn)
    for _ in range(2):
        loop.once()
    assert [one.message.partition(":")[0] for one in caplog.records] == ["reconciler"]
    number = sqlite_harness.submit(gpus=0)
    reconciler._database = sqlite_harness.database  # the database is back
    loop.once()
    assert sqlite_harness.states(number) == ["running"]
    away.close()


def test_a_hanging_loop_fails_the_health_checks(sqlite_harness: Harness) -> None:
    team, hung = sqlite_harness, threading.Event()
    slow = Loop("reconciler", 30.0, lambda: bool(hung.wait()) or None, now=lambda: team.now)
    slow.start()
    app = Service(team.database, Records((), NO_KEYS, refusal), loops=[slow])
    assert healthz(app) == readyz(app) == {"status": "ok"}
    team.now += LATE_PERIODS * 30.0 + 1
    for route in (healthz, readyz):
        assert failure_detail(app, route) == "the reconciler has not finished a turn for 151 s"
    hung.set()
    slow.close()
    assert slow.trouble == ""


def failure_detail(app: Service, route: Callable[[Service], object] = healthz) -> str:
    """Detail of the 503 that the route answers."""
    with pytest.raises(HTTPException) as caught:
        route(app)
    assert caught.value.status_code == 503
    return str(caught.value.detail)


def test_the_loop_survives_an_unexpected_exception(
    sqlite_harness: Harness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    team, fake = sqlite_harness, FakeExecutor()
    loop = Loop("reconciler", EVERY_S, team.reconciler(fake).turn)
    app = Service(team.database, Records((), NO_KEYS, refusal), loops=[loop])
    number = team.submit(gpus=0)
    with monkeypatch.context() as broken:
        broken.setattr(fake, "start", lambda _start: {}["nobody foresaw it"])
        loop.once()
    assert failure_detail(app) == "the reconciler failed (KeyError); see the server's log"
    assert "nobody foresaw it" in caplog.text and loop.pause_s > EVERY_S
    state, why = team.job(number)
    failed = "executor fake failed (KeyError); see the server's log"
    assert (state, why.partition(": ")[2]) == ("queued", failed)
    set_rows(team.server, JobRow, due=0.0)
    loop.once()
    assert (team.states(number), app.troubles) == (["running"], [])
    assert healthz(app) == {"status": "ok"}
