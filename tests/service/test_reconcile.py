"""The database and the executors, brought together: what waits is started once, what is gone is
known, and each job says why it waits."""

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
from advisor.service.executors import (
    Capacity,
    Executor,
    ExecutorAway,
    Start,
    Status,
    Unplaceable,
)
from advisor.service.loop import LATE_PERIODS, Loop
from advisor.service.reconcile import ASKS_S, EVERY_S, SILENT_S, Reconciler
from advisor.service.routes.admin import healthz, readyz
from advisor.service.schema import Attempt, JobRow
from tests.cache.servers import free_port
from tests.service.serving import Served, caller
from tests.service.test_jobs import cancelled, change, states, told

HERE = "http://127.0.0.1:1"


def named(*external: str) -> list[str]:
    """Jobs and attempts, without what makes their names differ from another database's."""
    return [one.rpartition("-")[0] for one in external]


class FakeExecutor:
    """So many GPUs of a name, and a CPU.

    Attributes:
        states: what is seen of an attempt that was started; `started` all of them, in order.
        away, full: why it does not answer, or takes nothing; `silent`: why it says nothing to what
            it has started.
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
        return named(*(one.external for one in self.started))

    def _answer(self) -> None:
        if self.away:
            raise ExecutorAway(self.away)


_: type[Executor] = FakeExecutor


class Team:
    """Somebody who submits to a server, whose reconcilers have a clock in seconds."""

    def __init__(self, served: Served) -> None:
        self.served, self.database, self.now = served, served.database, 1000.0
        self._me = caller(served, "submit")

    def reconciler(self, *executors: Executor) -> Reconciler:
        return Reconciler(self.database, executors, HERE, now=lambda: self.now)

    def submit(self, *words: str, **asked: Any) -> int:
        """Without the reason to wait that a server's own machines give."""
        wanted = JobSpec(command=("python", *(words or ("train.py",))), **asked)
        with self.database.writing() as session:
            return jobs.submit(session, wanted, self._me)[0].id

    def job(self, number: int) -> tuple[str, str]:
        said = told(self.served, number)
        return said["state"], said["reason"]

    def states(self, *numbers: int) -> list[str]:
        return [self.job(number)[0] for number in numbers]

    def attempts(self, number: int) -> list[str]:
        return states(self.served, number)[1]


@pytest.fixture
def team(served: Served) -> Team:
    return Team(served)


@pytest.fixture
def lite_team(served_lite: Served) -> Team:
    """For what no database has a part in."""
    return Team(served_lite)


def test_what_waits_is_started_where_there_is_room(team: Team) -> None:
    fake = FakeExecutor(gpus=2)
    reconciler = team.reconciler(fake)
    one, two, three, cpu = (team.submit(f"{n}.py", gpus=n % 3) for n in (1, 4, 2, 3))
    reconciler.turn()
    assert [start.asked.gpus for start in fake.started] == [1, 1, 0]
    assert team.states(one, two, three, cpu) == ["running", "running", "queued", "running"]
    assert team.job(three) == ("queued", "waits for 2 GPUs of NVIDIA H100: 0 free (used)")
    first = fake.started[0]
    assert fake.names[0] == f"advisor-{one}-1"
    assert (first.server_url, first.token[:4]) == (HERE, "adv_")
    for start in fake.started[:2]:
        fake.states[start.external] = Status(state="preempted", reason="the node goes")
    reconciler.turn()
    # The first that waits is the first that is started, and not what would fit beside it.
    assert fake.names[3:] == [f"advisor-{one}-2", f"advisor-{two}-2"]
    assert team.attempts(one) == ["preempted", "running"]


def test_what_cannot_be_placed_says_what_is_missing(lite_team: Team) -> None:
    team, fake = lite_team, FakeExecutor(gpus=1)
    reconciler = team.reconciler(fake)
    other, many = team.submit("a", gpu="B200"), team.submit("b", gpus=4)
    reconciler.turn()
    assert fake.started == []
    why = "no known machine has a GPU named 'B200' (known: NVIDIA H100, the CPU); the job waits"
    assert team.job(other) == ("queued", why)
    assert team.job(many) == ("queued", "waits for 4 GPUs of NVIDIA H100: 1 free")
    # A server that knows less does not take back what another one said.
    for server in (team.reconciler(FakeExecutor("other")), team.reconciler()):
        server.turn()
        assert team.job(many)[1].startswith("waits for 4 GPUs")
    alone = team.submit("none")
    team.reconciler().turn()
    assert team.job(alone)[1] == "no known machine has a GPU (known: none); the job waits"
    cancelled(team.served, alone)
    fake.full = "another was quicker"
    refused = team.submit("c")
    reconciler.turn()
    state, why = team.job(refused)
    assert (state, why.partition(": ")[2], team.attempts(refused)) == ("queued", fake.full, [])


def test_machines_are_known_though_nothing_waits(lite_team: Team) -> None:
    """As the pages show them; and no executor is asked every other second for it."""
    team, fake = lite_team, FakeExecutor(gpus=1)
    reconciler = team.reconciler(fake)
    for _ in range(3):
        reconciler.turn()
    (machine,) = reconciler.machines.values()
    assert [one.gpu for one in machine.devices] == ["NVIDIA H100", "CPU"] and fake.asked == 1
    team.now += ASKS_S
    fake.away = "connection refused"
    reconciler.turn()
    assert reconciler.machines["fake"].why == "connection refused"


def test_what_needs_many_gpus_is_not_passed_for_ever(team: Team) -> None:
    fake = FakeExecutor(gpus=4)
    reconciler = team.reconciler(fake)
    first, large = team.submit("first"), team.submit("large", gpus=4)
    never, after = team.submit("never", gpus=5), team.submit("after")
    reconciler.turn()
    assert team.states(first, large, after) == ["running", "queued", "running"]
    change(team.served, JobRow, changed=JobRow.changed - OVERTAKE_S)
    later = [team.submit("later", gpu="H100"), team.submit("B200", gpu="B200")]
    cpu = team.submit("cpu", gpus=0)
    reconciler.turn()
    assert team.job(later[0]) == ("queued", f"lets job {large} go first")
    assert team.job(large) == ("queued", "waits for 4 GPUs of NVIDIA H100: 2 free")
    assert "no known machine has" in team.job(later[1])[1] and team.states(cpu) == ["running"]
    fake.states = dict.fromkeys(fake.states, Status(state="preempted", reason="over"))
    for number in (first, after):
        cancelled(team.served, number)
    reconciler.turn()
    assert team.states(large, later[0]) == ["running", "queued"]
    cancelled(team.served, large)
    reconciler.turn()
    assert team.states(later[0], never) == ["running", "queued"]


def test_of_several_nodes_one_is_left_free(lite_team: Team) -> None:
    class Nodes(FakeExecutor):
        def capacity(self) -> Sequence[Capacity]:
            left = 2 - len(self.started)
            return [Capacity(gpu="H100", gpus=2, total=4), Capacity(gpu="H100", gpus=left, total=4)]

    team = lite_team
    team.submit("large", gpus=4)
    change(team.served, JobRow, changed=JobRow.changed - OVERTAKE_S)
    small = [team.submit(str(n)) for n in range(3)]
    team.reconciler(Nodes()).turn()
    assert team.states(*small) == ["running", "running", "queued"]


def test_what_an_executor_says_of_attempts_is_followed(lite_team: Team) -> None:
    """One that ended without a word is started again; one of a cancelled job is stopped; while the
    executor is away, nothing changes."""
    team, fake, other = lite_team, FakeExecutor(), FakeExecutor("other")
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
    cancelled(team.served, number)
    reconciler.turn()
    assert named(*fake.stopped)[-1] == f"advisor-{number}-3"
    assert team.attempts(number)[-1] == "running"
    reconciler.turn()
    assert (team.states(number), team.attempts(number)[-1]) == (["cancelled"], "cancelled")


@pytest.mark.parametrize(
    ("place", "limit_s"),
    [
        ("seen", SILENT_S),
        # Its server was killed before it started what it had claimed.
        ("unknown", LEASE_S),
        ("elsewhere", LEASE_S),
    ],
)
def test_who_is_silent_is_given_up_in_time(team: Team, place: str, limit_s: float) -> None:
    """While no server was there, or its database was not, no worker could say anything."""
    fake = FakeExecutor()
    number = team.submit(gpus=0)
    if place == "unknown":
        with team.database.writing() as session:
            attempts.claim(session, "fake", Capacity(gpu="", gpus=0))
    else:
        team.reconciler(fake if place == "seen" else FakeExecutor("other")).turn()
    again = team.reconciler(fake)
    for _ in range(4):  # it beats
        again.turn()
        team.now += LEASE_S / 3
    assert team.attempts(number) == ["running"]
    change(team.served, Attempt, beat=Attempt.beat - limit_s - 1)  # nobody was heard of
    team.now += 1000  # asleep
    again.turn()
    assert place == "unknown" or team.attempts(number) == ["running"]
    for _ in range(5):
        team.now += LEASE_S / 3
        again.turn()
    assert team.attempts(number) == ["lost", "running"]


def test_what_an_executor_does_not_answer_to_was_never_begun(team: Team) -> None:
    """Its head timed out: nobody knows whether it starts what it was sent."""
    fake = FakeExecutor()
    number = team.submit(gpus=0)
    fake.silent = "the head timed out"
    for _ in range(MAX_LOST + 1):
        team.reconciler(fake).turn()
        assert team.job(number)[1].endswith(f"executor fake: {fake.silent}")
        assert team.attempts(number) == []
        with team.database.reading() as session:
            assert attempts.of_start(session, fake.started[-1].token) is None
        change(team.served, JobRow, due=0.0)
    fake.silent = ""
    team.reconciler(fake).turn()
    assert team.states(number) == team.attempts(number) == ["running"]
    assert len(fake.started) == MAX_LOST + 2


def test_a_database_away_is_told_once(lite_team: Team, caplog: pytest.LogCaptureFixture) -> None:
    away = Database(f"postgresql+psycopg://me@127.0.0.1:{free_port()}/x")
    reconciler = Reconciler(away, [FakeExecutor()], HERE)
    loop = Loop("reconciler", EVERY_S, reconciler.turn)
    for _ in range(2):
        loop.once()
    assert [one.message.partition(":")[0] for one in caplog.records] == ["reconciler"]
    number = lite_team.submit(gpus=0)
    reconciler._database = lite_team.database  # it is back
    loop.once()
    assert lite_team.states(number) == ["running"]
    away.close()


def test_a_loop_that_does_not_come_round_is_seen(lite_team: Team) -> None:
    team, hung = lite_team, threading.Event()
    slow = Loop("reconciler", 30.0, lambda: bool(hung.wait()) or None, now=lambda: team.now)
    slow.start()
    app = Service(team.database, Records((), NO_KEYS, refusal), loops=[slow])
    assert healthz(app) == readyz(app) == {"status": "ok"}
    team.now += LATE_PERIODS * 30.0 + 1
    for route in (healthz, readyz):
        assert unwell(app, route) == "the reconciler has not finished a turn for 151 s"
    hung.set()
    slow.close()
    assert slow.trouble == ""


def unwell(app: Service, route: Callable[[Service], object] = healthz) -> str:
    """What a route says of a server that is not well."""
    with pytest.raises(HTTPException) as caught:
        route(app)
    assert caught.value.status_code == 503
    return str(caught.value.detail)


def test_an_unforeseen_exception_ends_no_loop(
    lite_team: Team, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    team, fake = lite_team, FakeExecutor()
    loop = Loop("reconciler", EVERY_S, team.reconciler(fake).turn)
    app = Service(team.database, Records((), NO_KEYS, refusal), loops=[loop])
    number = team.submit(gpus=0)
    with monkeypatch.context() as broken:
        broken.setattr(fake, "start", lambda _start: {}["nobody foresaw it"])
        loop.once()
    assert unwell(app) == "the reconciler failed (KeyError); see the server's log"
    assert "nobody foresaw it" in caplog.text and loop.pause_s > EVERY_S
    state, why = team.job(number)
    failed = "executor fake failed (KeyError); see the server's log"
    assert (state, why.partition(": ")[2]) == ("queued", failed)
    change(team.served, JobRow, due=0.0)
    loop.once()
    assert (team.states(number), app.troubles) == (["running"], [])
    assert healthz(app) == {"status": "ok"}
