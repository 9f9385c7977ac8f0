"""The database and the executors, brought together: what waits is started once, what is gone is
known, and each job says why it waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from fastapi import HTTPException
from sqlalchemy import select, update

from advisor.cache.reader import Reader
from advisor.cache.signing import NO_KEYS
from advisor.jobs.spec import JobSpec
from advisor.open_store import refusal
from advisor.service import attempts, jobs
from advisor.service.access import Service
from advisor.service.attempts import LEASE_S, MAX_LOST, PATIENCE_S
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
from advisor.service.routes.health import healthz, readyz
from advisor.service.schema import Attempt, Job
from advisor.service.tokens import Caller, make
from tests.cache.servers import free_port
from tests.service.serving import wait_until

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

    def __init__(self, name: str = "fake", gpu: str = "NVIDIA H100", gpus: int = 0) -> None:
        self.name, self._gpu, self._gpus = name, gpu, gpus
        self.states: dict[str, Status] = {}
        self.started: list[Start] = []
        self.stopped: list[str] = []
        self.away = self.full = self.silent = ""
        self.asked = 0
        self._lock = threading.Lock()

    def capacity(self) -> Sequence[Capacity]:
        self._answer()
        self.asked += 1
        running = [one for one in self.started if self.states[one.external].state == "running"]
        free = self._gpus - sum(one.asked.gpus for one in running)
        why = "" if free else "used"
        found = [Capacity(gpu=self._gpu, gpus=free, total=self._gpus, why=why)] * bool(self._gpus)
        busy = any(not one.asked.gpus for one in running)
        return found if busy else [*found, Capacity(gpu="", gpus=0)]

    def start(self, start: Start) -> None:
        self._answer()
        if self.full:
            raise Unplaceable(self.full)
        with self._lock:
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

    def close(self) -> None:
        pass

    def end_all(self, status: Status) -> None:
        for one in self.states:
            self.states[one] = status

    @property
    def names(self) -> list[str]:
        return named(*(one.external for one in self.started))

    def _answer(self) -> None:
        if self.away:
            raise ExecutorAway(self.away)


class Team:
    """A database with a person who submits, and a clock in seconds."""

    def __init__(self, url: str) -> None:
        self.now = 1000.0
        self.database = Database(url)
        self.database.start(lambda _session: None)
        with self.database.writing() as session:
            token, _text = make(session, "me", "admin", None, None)
            self.me = Caller(token.id, "me", "admin")

    def reconciler(self, *executors: Executor) -> Reconciler:
        return Reconciler(self.database, executors, HERE, now=lambda: self.now)

    def submit(self, *words: str, **asked: Any) -> int:
        with self.database.writing() as session:
            wanted = JobSpec(command=("python", *(words or ("train.py",))), **asked)
            return jobs.submit(session, wanted, self.me)[0].id

    def job(self, number: int) -> tuple[str, str]:
        with self.database.reading() as session:
            found = session.get_one(Job, number)
            return found.state, found.reason

    def states(self, *numbers: int) -> list[str]:
        return [self.job(number)[0] for number in numbers]

    def attempts(self, number: int) -> list[str]:
        with self.database.reading() as session:
            query = select(Attempt.state).where(Attempt.job == number).order_by(Attempt.number)
            return list(session.scalars(query))

    def change(self, table: type[Job] | type[Attempt], **values: Any) -> None:
        with self.database.writing() as session:
            session.execute(update(table).values(**values))

    def silent(self, seconds: float) -> None:
        """As if nobody had been heard of for so long."""
        self.change(Attempt, beat=Attempt.beat - seconds)

    def cancel(self, *numbers: int) -> None:
        with self.database.writing() as session:
            for number in numbers:
                jobs.cancel(session, number, self.me)


@pytest.fixture
def team(database_url: str) -> Iterator[Team]:
    found = Team(database_url)
    yield found
    found.database.close()


@pytest.fixture
def lite_team(lite: str) -> Iterator[Team]:
    """For what no database has a part in."""
    found = Team(lite)
    yield found
    found.database.close()


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
    why = "no machine known now has a GPU named 'B200' (known: NVIDIA H100, the CPU); the job waits"
    assert team.job(other) == ("queued", why)
    assert team.job(many) == ("queued", "waits for 4 GPUs of NVIDIA H100: 1 free")
    # A server that knows less does not take back what another one said.
    for server in (team.reconciler(FakeExecutor("other")), team.reconciler()):
        server.turn()
        assert team.job(many)[1].startswith("waits for 4 GPUs")
    alone = team.submit("none")
    team.reconciler().turn()
    assert team.job(alone)[1] == "no machine known now has a GPU (known: none); the job waits"
    team.cancel(alone)
    fake.full = "another was quicker"
    refused = team.submit("c")
    reconciler.turn()
    assert (team.job(refused), team.attempts(refused)) == (("queued", fake.full), [])


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
    team.change(Job, changed=Job.changed - PATIENCE_S)
    later = [team.submit("later", gpu="H100"), team.submit("B200", gpu="B200")]
    cpu = team.submit("cpu", gpus=0)
    reconciler.turn()
    assert team.job(later[0]) == ("queued", f"lets job {large} go first")
    assert team.job(large) == ("queued", "waits for 4 GPUs of NVIDIA H100: 2 free")
    assert "no machine known now has" in team.job(later[1])[1] and team.states(cpu) == ["running"]
    fake.end_all(Status(state="preempted", reason="over"))
    team.cancel(first, after)
    reconciler.turn()
    assert team.states(large, later[0]) == ["running", "queued"]
    team.cancel(large)
    reconciler.turn()
    assert team.states(later[0], never) == ["running", "queued"]


def test_of_several_nodes_one_is_left_free(lite_team: Team) -> None:
    class Nodes(FakeExecutor):
        def capacity(self) -> Sequence[Capacity]:
            left = 2 - len(self.started)
            return [Capacity(gpu="H100", gpus=2, total=4), Capacity(gpu="H100", gpus=left, total=4)]

    team = lite_team
    team.submit("large", gpus=4)
    team.change(Job, changed=Job.changed - PATIENCE_S)
    small = [team.submit(str(n)) for n in range(3)]
    team.reconciler(Nodes()).turn()
    assert team.states(*small) == ["running", "running", "queued"]


def test_what_ended_without_a_word_is_started_again(lite_team: Team) -> None:
    team, fake = lite_team, FakeExecutor()
    reconciler = team.reconciler(fake)
    number = team.submit(gpus=0)
    for status in (Status(state="ended"), Status(state="ended", reason="node 1 burnt")):
        reconciler.turn()
        fake.states[fake.started[-1].external] = status
    reconciler.turn()
    assert team.attempts(number) == ["lost", "lost", "running"]


def test_what_is_cancelled_is_stopped(lite_team: Team) -> None:
    team, fake = lite_team, FakeExecutor()
    reconciler = team.reconciler(fake)
    number = team.submit(gpus=0)
    reconciler.turn()
    team.cancel(number)
    reconciler.turn()
    assert named(*fake.stopped) == [f"advisor-{number}-1"]
    assert team.attempts(number) == ["running"]
    reconciler.turn()
    assert team.states(number) == team.attempts(number) == ["cancelled"]


def test_who_is_silent_is_given_up_once_they_could_be_heard(team: Team) -> None:
    """While no server was there, or its database was not, no worker could say anything."""
    fake = FakeExecutor()
    number = team.submit(gpus=0)
    team.reconciler(fake).turn()
    team.silent(SILENT_S + 1)
    again = team.reconciler(fake)
    again.turn()
    assert team.states(number) == ["running"]
    for _ in range(4):  # as it goes on
        team.now += LEASE_S / 3
        again.turn()
    assert team.attempts(number) == ["lost", "running"]
    team.silent(SILENT_S + 1)
    team.now += 1000  # asleep
    again.turn()
    assert team.attempts(number) == ["lost", "running"]


def test_an_executor_of_another_machine_that_is_gone(lite_team: Team) -> None:
    team = lite_team
    number = team.submit(gpus=0)
    team.reconciler(FakeExecutor("local:other")).turn()
    here = team.reconciler(FakeExecutor(gpus=1))
    for _ in range(5):
        team.now += LEASE_S / 3
        here.turn()
    assert team.attempts(number) == ["running"]  # it beats
    team.silent(LEASE_S + 1)
    here.turn()
    assert team.attempts(number)[0] == "lost"


def test_what_was_claimed_and_never_started(lite_team: Team) -> None:
    """Its server was killed in between: the executor has never heard of it."""
    team, fake = lite_team, FakeExecutor()
    number = team.submit(gpus=0)
    with team.database.writing() as session:
        attempts.claim(session, "fake", Capacity(gpu="", gpus=0))
    reconciler = team.reconciler(fake)
    reconciler.turn()
    assert team.attempts(number) == ["running"]  # another server may be about to start it
    team.silent(LEASE_S + 1)
    reconciler.turn()
    assert team.attempts(number) == ["lost", "running"]
    assert fake.names == [f"advisor-{number}-2"]


def test_an_executor_that_does_not_answer_changes_nothing(lite_team: Team) -> None:
    team, fake, other = lite_team, FakeExecutor(), FakeExecutor("other")
    reconciler = team.reconciler(fake, other)
    number = team.submit(gpus=0)
    reconciler.turn()
    fake.away = "connection refused"
    later = team.submit("later", gpus=0)
    reconciler.turn()
    assert team.attempts(number) == ["running"] and other.names == [f"advisor-{later}-1"]


def test_what_an_executor_does_not_answer_to_was_never_begun(team: Team) -> None:
    """Its head timed out: nobody knows whether it starts what it was sent."""
    fake = FakeExecutor()
    number = team.submit(gpus=0)
    fake.silent = "the head timed out"
    for _ in range(MAX_LOST + 1):
        team.reconciler(fake).turn()
        assert (team.job(number), team.attempts(number)) == (("queued", fake.silent), [])
        with team.database.reading() as session:
            assert attempts.of_start(session, fake.started[-1].token) is None
        team.change(Job, due=0.0)
    fake.silent = ""
    team.reconciler(fake).turn()
    assert team.states(number) == team.attempts(number) == ["running"]
    assert len(fake.started) == MAX_LOST + 2


def test_a_database_that_is_away_is_told_once_and_asked_again(
    lite_team: Team, caplog: pytest.LogCaptureFixture
) -> None:
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
    app = Service(team.database, Reader(NO_KEYS, refusal), loops=[slow])
    assert healthz(app) == readyz(app) == {"status": "ok"}
    team.now += LATE_PERIODS * 30.0 + 1
    for route in (healthz, readyz):
        with pytest.raises(HTTPException) as caught:
            route(app)
        assert caught.value.status_code == 503
        assert caught.value.detail == "the reconciler has not come round for 151 s"
    hung.set()
    slow.close()
    assert slow.trouble == ""


def test_an_unforeseen_exception_ends_no_loop(
    lite_team: Team, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    team, fake = lite_team, FakeExecutor()
    loop = Loop("reconciler", EVERY_S, team.reconciler(fake).turn)
    app = Service(team.database, Reader(NO_KEYS, refusal), loops=[loop])
    number = team.submit(gpus=0)
    with monkeypatch.context() as broken:
        broken.setattr(fake, "start", lambda _start: {}["nobody foresaw it"])
        loop.once()
    with pytest.raises(HTTPException) as caught:
        healthz(app)
    assert caught.value.status_code == 503
    assert caught.value.detail == "the reconciler failed (KeyError); see the server's log"
    assert "nobody foresaw it" in caplog.text and loop.pause_s > EVERY_S
    assert team.job(number) == ("queued", "executor fake failed (KeyError); see the server's log")
    team.change(Job, due=0.0)
    loop.once()
    assert (team.states(number), app.troubles) == (["running"], [])
    assert healthz(app) == {"status": "ok"}


def test_a_loop_goes_on_after_an_unforeseen_exception() -> None:
    turns: list[int] = []

    def stumbles() -> None:
        turns.append(1)
        raise LookupError("nobody foresaw it")

    loop = Loop("upkeep", 0.001, stumbles)
    loop.start()
    wait_until(lambda: len(turns) > 3)
    assert loop.trouble == "the upkeep failed (LookupError); see the server's log"
    loop.close()


def test_several_servers_start_each_job_once(new_postgresql: str) -> None:
    team, fake = Team(new_postgresql), FakeExecutor(gpus=40)
    numbers = [team.submit(str(n)) for n in range(8)]
    databases = [Database(new_postgresql) for _ in range(4)]
    threads = [threading.Thread(target=Reconciler(one, [fake], HERE).turn) for one in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fake.names) == sorted(f"advisor-{number}-1" for number in numbers)
    assert set(team.states(*numbers)) == {"running"}
    for one in [*databases, team.database]:
        one.close()


def _proof(executor: FakeExecutor) -> Executor:
    return executor
