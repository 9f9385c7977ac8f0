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
from advisor.cache.seal import NO_KEYS
from advisor.jobs.spec import JobSpec
from advisor.opening import refusal
from advisor.service import attempts, jobs
from advisor.service.access import Service
from advisor.service.attempts import LEASE_S, MOST_LOST, PATIENCE_S
from advisor.service.database import Database
from advisor.service.executors import Executor, ExecutorAway, Room, Start, Status, Unplaceable
from advisor.service.loop import LATE_PERIODS, Loop
from advisor.service.reconcile import EVERY_S, SILENT_S, Reconciler
from advisor.service.routes.health import healthz, readyz
from advisor.service.schema import Attempt, Job
from advisor.service.tokens import Caller, make
from tests.cache.servers import free_port
from tests.service.serving import wait_until

HERE = "http://127.0.0.1:1"


def named(*external: str) -> list[str]:
    """Jobs and attempts, without what makes their names differ from another database's."""
    return [one.rpartition("-")[0] for one in external]


class Made:
    """An executor of a test's own: so many GPUs of a name, and a CPU.

    Attributes:
        states: what is seen of an attempt that was started; `started` all of them, in order.
        away, full: why it does not answer, or takes nothing; `silent`: why it says nothing to what
            it has started.
    """

    def __init__(self, name: str = "made", gpu: str = "NVIDIA H100", gpus: int = 0) -> None:
        self.name, self._gpu, self._gpus = name, gpu, gpus
        self.states: dict[str, Status] = {}
        self.started: list[Start] = []
        self.stopped: list[str] = []
        self.away = self.full = self.silent = ""
        self._lock = threading.Lock()

    def room(self) -> Sequence[Room]:
        self._answer()
        running = [one for one in self.started if self._runs(one.external)]
        free = self._gpus - sum(one.asked.gpus for one in running)
        room = Room(gpu=self._gpu, gpus=free, total=self._gpus, why="" if free else "used")
        rooms = [room] if self._gpus else []
        return (
            rooms if any(not one.asked.gpus for one in running) else [*rooms, Room(gpu="", gpus=0)]
        )

    def start(self, start: Start) -> str:
        self._answer()
        if self.full:
            raise Unplaceable(self.full)
        with self._lock:
            self.started.append(start)
            self.states[start.external] = Status(state="running")
        if self.silent:
            self.states[start.external] = Status(state="ended", reason="refused")
            raise ExecutorAway(self.silent)
        return f"{start.asked.gpus} of {self.name}"

    def status(self, external: Sequence[str]) -> Mapping[str, Status]:
        self._answer()
        return {one: self.states.get(one, Status(state="unknown")) for one in external}

    def stop(self, external: str) -> None:
        self.stopped.append(external)
        self.states[external] = Status(state="ended", reason="stopped")

    def close(self) -> None:
        pass

    def _runs(self, external: str) -> bool:
        return self.states[external].state == "running"

    def _answer(self) -> None:
        if self.away:
            raise ExecutorAway(self.away)


class Clock:
    """Seconds, as a test has them go by."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Team:
    """A database with a person who submits."""

    def __init__(self, url: str) -> None:
        self.database = Database(url)
        self.database.start(lambda _session: None)
        with self.database.writing() as session:
            token, _text = make(session, "me", "admin", None, None)
            self.me = Caller(token.id, "me", "admin")

    def submit(self, *words: str, **asked: Any) -> int:
        with self.database.writing() as session:
            wanted = JobSpec(command=("python", *(words or ("train.py",))), **asked)
            return jobs.submit(session, wanted, self.me).job.id

    def job(self, number: int) -> tuple[str, str]:
        with self.database.reading() as session:
            found = session.get_one(Job, number)
            return found.state, found.reason

    def tries(self, number: int) -> list[str]:
        with self.database.reading() as session:
            query = select(Attempt.state).where(Attempt.job == number).order_by(Attempt.number)
            return list(session.scalars(query))

    def silent(self, seconds: float) -> None:
        """As if nobody had been heard of for so long."""
        with self.database.writing() as session:
            session.execute(update(Attempt).values(beat=Attempt.beat - seconds))

    def cancel(self, number: int) -> None:
        with self.database.writing() as session:
            jobs.cancel(session, number, self.me)


@pytest.fixture
def team(database_url: str) -> Iterator[Team]:
    found = Team(database_url)
    yield found
    found.database.close()


def test_what_waits_is_started_where_there_is_room(team: Team) -> None:
    made = Made(gpus=2)
    reconciler = Reconciler(team.database, [made], HERE)
    one, two, three, cpu = (team.submit(f"{n}.py", gpus=n % 3) for n in (1, 4, 2, 3))
    reconciler.turn()
    assert [start.asked.gpus for start in made.started] == [1, 1, 0]
    assert [team.job(n)[0] for n in (one, two, three, cpu)] == [
        *["running"] * 2,
        "queued",
        "running",
    ]
    assert team.job(three) == ("queued", "waits for 2 GPUs of NVIDIA H100: 0 free (used)")
    first = made.started[0]
    assert named(first.external) == [f"advisor-{one}-1"]
    assert (first.server_url, first.token[:4]) == (HERE, "adv_")
    for start in made.started[:2]:
        made.states[start.external] = Status(state="preempted", reason="the node goes")
    reconciler.turn()
    # The first that waits is the first that is started, and not what would fit beside it.
    assert named(*(start.external for start in made.started[3:])) == [
        f"advisor-{one}-2",
        f"advisor-{two}-2",
    ]
    assert team.tries(one) == ["preempted", "running"]


def test_what_cannot_be_placed_says_what_is_missing(team: Team) -> None:
    made = Made(gpus=1)
    reconciler = Reconciler(team.database, [made], HERE)
    named, many = team.submit("a", gpu="B200"), team.submit("b", gpus=4)
    reconciler.turn()
    assert made.started == []
    there = "there are: NVIDIA H100, the CPU"
    assert team.job(named) == ("queued", f"no executor has a GPU named 'B200'; {there}")
    assert team.job(many) == ("queued", "waits for 4 GPUs of NVIDIA H100: 1 free")
    # A server that knows less does not take back what another one said.
    Reconciler(team.database, [Made("other")], HERE).turn()
    assert team.job(many)[1].startswith("waits for 4 GPUs")
    made.full = "another was quicker"
    refused = team.submit("c")
    reconciler.turn()
    assert team.job(refused) == ("queued", "another was quicker")
    assert team.tries(refused) == []


def test_what_needs_many_gpus_is_not_passed_for_ever(team: Team) -> None:
    made = Made(gpus=4)
    reconciler = Reconciler(team.database, [made], HERE)
    first, large = team.submit("first"), team.submit("large", gpus=4)
    never, after = team.submit("never", gpus=5), team.submit("after")
    reconciler.turn()
    assert [team.job(n)[0] for n in (first, large, after)] == ["running", "queued", "running"]
    with team.database.writing() as session:
        session.execute(update(Job).values(changed=Job.changed - PATIENCE_S))
    later = [team.submit("later", gpu="H100"), team.submit("B200", gpu="B200")]
    cpu = team.submit("cpu", gpus=0)
    reconciler.turn()
    assert team.job(later[0]) == ("queued", f"lets job {large} go first")
    assert team.job(large) == ("queued", "waits for 4 GPUs of NVIDIA H100: 2 free")
    assert "no executor has" in team.job(later[1])[1] and team.job(cpu)[0] == "running"
    for start in made.started:
        made.states[start.external] = Status(state="preempted", reason="over")
    for number in (first, after):
        team.cancel(number)
    reconciler.turn()
    assert (team.job(large)[0], team.job(later[0])[0]) == ("running", "queued")
    team.cancel(large)
    reconciler.turn()
    assert (team.job(later[0])[0], team.job(never)[0]) == ("running", "queued")


def test_of_several_nodes_one_is_left_free(team: Team) -> None:
    class Nodes(Made):
        def room(self) -> Sequence[Room]:
            left = 2 - len(self.started)
            return [Room(gpu="H100", gpus=2, total=4), Room(gpu="H100", gpus=left, total=4)]

    made = Nodes()
    team.submit("large", gpus=4)
    with team.database.writing() as session:
        session.execute(update(Job).values(changed=Job.changed - PATIENCE_S))
    small = [team.submit(str(n)) for n in range(3)]
    Reconciler(team.database, [made], HERE).turn()
    assert [team.job(n)[0] for n in small] == ["running", "running", "queued"]


def test_what_is_gone_is_started_again_a_few_times(team: Team) -> None:
    made = Made()
    reconciler = Reconciler(team.database, [made], HERE)
    number = team.submit(gpus=0)
    for turn in range(1, MOST_LOST + 1):
        reconciler.turn()
        assert team.job(number)[0] == "running" and len(made.started) == turn
        made.states[made.started[-1].external] = Status(state="ended", reason=f"node {turn} burnt")
    reconciler.turn()
    state, reason = team.job(number)
    assert state == "failed" and reason.startswith(
        f"{MOST_LOST} attempts were lost: node 1 burnt; "
    )
    assert team.tries(number) == ["lost"] * MOST_LOST and len(made.started) == MOST_LOST


def test_what_is_cancelled_is_stopped(team: Team) -> None:
    made = Made()
    reconciler = Reconciler(team.database, [made], HERE)
    number = team.submit(gpus=0)
    reconciler.turn()
    team.cancel(number)
    reconciler.turn()
    assert named(*made.stopped) == [f"advisor-{number}-1"]
    assert team.tries(number) == ["running"]
    reconciler.turn()
    assert team.job(number)[0] == "cancelled" and team.tries(number) == ["cancelled"]


def test_who_is_silent_is_given_up_once_they_could_be_heard(team: Team) -> None:
    """While no server was there, or its database was not, no worker could say anything."""
    made, clock = Made(), Clock()
    number = team.submit(gpus=0)
    Reconciler(team.database, [made], HERE).turn()
    team.silent(SILENT_S + 1)
    again = Reconciler(team.database, [made], HERE, now=clock)
    again.turn()
    assert team.job(number)[0] == "running"
    for _ in range(4):  # as it goes on
        clock.now += LEASE_S / 3
        again.turn()
    assert team.tries(number) == ["lost", "running"]
    team.silent(SILENT_S + 1)
    clock.now += 1000  # asleep
    again.turn()
    assert team.tries(number) == ["lost", "running"]


def test_an_executor_of_another_machine_that_is_gone(team: Team) -> None:
    other, clock = Made("local:other"), Clock()
    number = team.submit(gpus=0)
    Reconciler(team.database, [other], HERE).turn()
    here = Reconciler(team.database, [Made(gpus=1)], HERE, now=clock)
    for _ in range(5):
        clock.now += LEASE_S / 3
        here.turn()
    assert team.tries(number) == ["running"]  # it beats
    team.silent(LEASE_S + 1)
    here.turn()
    assert team.tries(number)[0] == "lost"


def test_what_was_claimed_and_never_started(team: Team) -> None:
    """Its server was killed in between: the executor has never heard of it."""
    number = team.submit(gpus=0)
    with team.database.writing() as session:
        attempts.claim(session, "made", Room(gpu="", gpus=0))
    made = Made()
    reconciler = Reconciler(team.database, [made], HERE)
    reconciler.turn()
    assert team.tries(number) == ["running"]  # another server may be about to start it
    team.silent(LEASE_S + 1)
    reconciler.turn()
    assert team.tries(number) == ["lost", "running"]
    assert named(*(start.external for start in made.started)) == [f"advisor-{number}-2"]


def test_an_executor_that_does_not_answer_changes_nothing(team: Team) -> None:
    made, other = Made(), Made("other")
    reconciler = Reconciler(team.database, [made, other], HERE)
    number = team.submit(gpus=0)
    reconciler.turn()
    made.away = "connection refused"
    later = team.submit("later", gpus=0)
    reconciler.turn()
    assert team.tries(number) == ["running"]
    assert named(*(start.external for start in other.started)) == [f"advisor-{later}-1"]


def test_what_an_executor_does_not_answer_to_was_never_begun(team: Team) -> None:
    """Its head timed out: nobody knows whether it starts what it was sent."""
    made = Made()
    number = team.submit(gpus=0)
    made.silent = "the head timed out"
    for _ in range(MOST_LOST + 1):
        Reconciler(team.database, [made], HERE).turn()
        assert (team.job(number), team.tries(number)) == (("queued", made.silent), [])
        with team.database.writing() as session:
            assert attempts.of_start(session, made.started[-1].token) is None
            session.execute(update(Job).values(due=0.0))
    made.silent = ""
    Reconciler(team.database, [made], HERE).turn()
    assert team.job(number)[0] == "running" and team.tries(number) == ["running"]
    assert len(made.started) == MOST_LOST + 2


def test_a_database_that_is_away_is_told_once_and_asked_again(
    lite: str, caplog: pytest.LogCaptureFixture
) -> None:
    away = Database(f"postgresql+psycopg://me@127.0.0.1:{free_port()}/x")
    made, clock = Made(), Clock()
    reconciler = Reconciler(away, [made], HERE, now=clock)
    for _ in range(2):
        reconciler.loop.once()
    assert [one.message.partition(":")[0] for one in caplog.records] == ["reconciler"]
    team = Team(lite)
    number = team.submit(gpus=0)
    reconciler._database = team.database  # it is back
    reconciler.loop.once()
    assert team.job(number)[0] == "running"
    for one in (away, team.database):
        one.close()


def test_a_loop_that_does_not_come_round_is_seen(team: Team) -> None:
    clock, hung = Clock(), threading.Event()
    slow = Loop("reconciler", 30.0, lambda: bool(hung.wait()) or None, now=clock)
    slow.start()
    app = Service(team.database, Reader(NO_KEYS, refusal), loops=[slow])
    assert healthz(app) == readyz(app) == {"status": "ok"}
    clock.now += LATE_PERIODS * 30.0 + 1
    for route in (healthz, readyz):
        with pytest.raises(HTTPException) as caught:
            route(app)
        assert caught.value.status_code == 503
        assert caught.value.detail == "the reconciler has not come round for 151 s"
    hung.set()
    slow.close()
    assert slow.trouble == ""


def test_an_unforeseen_exception_ends_no_loop(
    team: Team, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made()
    reconciler = Reconciler(team.database, [made], HERE)
    app = Service(team.database, Reader(NO_KEYS, refusal), loops=[reconciler.loop])
    number = team.submit(gpus=0)
    with monkeypatch.context() as broken:
        broken.setattr(made, "start", lambda _start: {}["nobody foresaw it"])
        reconciler.loop.once()
    with pytest.raises(HTTPException) as caught:
        healthz(app)
    assert caught.value.status_code == 503
    assert caught.value.detail == "the reconciler failed (KeyError); see the server's log"
    assert "nobody foresaw it" in caplog.text and reconciler.loop.pause_s > EVERY_S
    assert team.job(number) == ("queued", "executor made failed (KeyError); see the server's log")
    with team.database.writing() as session:
        session.execute(update(Job).values(due=0.0))
    reconciler.loop.once()
    assert (team.job(number)[0], app.troubles) == ("running", [])
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


def test_a_server_without_executors_says_why_nothing_starts(team: Team) -> None:
    number = team.submit()
    Reconciler(team.database, [], HERE).turn()
    assert team.job(number) == ("queued", "no executor has a GPU; there are: none now")


def test_several_servers_start_each_job_once(new_postgresql: str) -> None:
    team = Team(new_postgresql)
    made = Made(gpus=40)
    numbers = [team.submit(str(n)) for n in range(20)]
    databases = [Database(new_postgresql) for _ in range(4)]
    threads = [threading.Thread(target=Reconciler(one, [made], HERE).turn) for one in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    started = named(*(start.external for start in made.started))
    assert sorted(started) == sorted(f"advisor-{number}-1" for number in numbers)
    assert {team.job(number)[0] for number in numbers} == {"running"}
    for one in [*databases, team.database]:
        one.close()


def _proof(executor: Made) -> Executor:
    return executor
