"""The tables of the database. Times are Unix seconds; those of jobs by the database's clock."""

from __future__ import annotations

from typing import Annotated

from sqlalchemy import BigInteger, ForeignKey, Index, String, text
from sqlalchemy.orm import DeclarativeBase, Mapped, declared_attr, mapped_column

Bytewise = Annotated[str, mapped_column(String().with_variant(String(collation="C"), "postgresql"))]
"""Text that is ordered by its bytes, whatever the language of the database."""
Large = Annotated[int, mapped_column(BigInteger)]
TokenId = Annotated[int, mapped_column(ForeignKey("tokens.id"))]
JobId = Annotated[int, mapped_column(ForeignKey("jobs.id"))]
AttemptId = Annotated[int, mapped_column(ForeignKey("attempts.id"))]
NARROWED = {
    **{name: (name,) for name in ("model", "target", "file", "family", "command")},
    **{name: (name, "target") for name in ("origin", "code")},
}
"""Indexes for lookups and their first columns; the columns `terms` and `created` follow."""


class Base(DeclarativeBase):
    """The base of all tables. A table has its class's name without `Row`, as a plural."""

    @declared_attr.directive
    def __tablename__(cls) -> str:
        return f"{cls.__name__.removesuffix('Row').lower()}s"


class Stored(Base):
    """What clients store under a key. Each token has a quota of `size`, in bytes, in each table."""

    __abstract__ = True

    key: Mapped[Bytewise] = mapped_column(primary_key=True)
    size: Mapped[int]
    token: Mapped[TokenId]
    data: Mapped[bytes] = mapped_column(deferred=True)


class Item(Stored):
    """A version of a record, under its key in a store; see `cache.name` for parts of the key.

    Attributes:
        record_key: the same for all versions of a record.
        called: the target's name; `file`: the name of its file or module.
        fields: all fields of the record's key, as JSON; `terms`: a digest, see `terms_of`.
        speedup: of the config that is used by default; 0 if it is doubtful.
        framework: the libraries that define the model's classes.
        created: when it was measured; `stored`: when the server stored it.
    """

    __tablename__ = "records"
    __table_args__ = (
        *(Index(f"records_of_{one}", *of, "terms", "created") for one, of in NARROWED.items()),
        Index("records_of_id", "id", "batch"),
        Index("records_of_token", "token", "size"),
    )

    record_key: Mapped[Bytewise] = mapped_column(index=True)
    model: Mapped[Bytewise]
    id: Mapped[Bytewise]
    batch: Mapped[Large]
    target: Mapped[Bytewise]
    origin: Mapped[Bytewise]
    called: Mapped[str]
    file: Mapped[Bytewise]
    code: Mapped[Bytewise]
    family: Mapped[Bytewise]
    command: Mapped[Bytewise]
    device: Mapped[Bytewise] = mapped_column(index=True)
    fields: Mapped[str]
    terms: Mapped[Bytewise]
    speedup: Mapped[float]
    trust: Mapped[Bytewise]
    framework: Mapped[Bytewise]
    created: Mapped[float]
    stored: Mapped[float]


class ArtifactsRow(Stored):
    """The compiled code for a config of a record, under its label (see `cache.artifacts`)."""

    __tablename__ = "artifacts"
    __table_args__ = (Index("artifacts_of_token", "token", "size"),)

    record_key: Mapped[Bytewise]
    stored: Mapped[float]


class Archive(Stored):
    """A job's code, under its SHA-256. `used`: when a job with it was last submitted."""

    __table_args__ = (Index("archives_of_token", "token", "size"),)

    used: Mapped[float]


class Token(Base):
    """A token's role and SHA-256 (`digest`). Its text is not stored."""

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[bytes] = mapped_column(unique=True)
    name: Mapped[str]
    role: Mapped[str]
    created: Mapped[float]
    expires: Mapped[float | None]
    revoked: Mapped[float | None]
    used: Mapped[float | None]


class Session(Base):
    """A browser's session, logged in with a token. `digest`: of the cookie's value."""

    digest: Mapped[bytes] = mapped_column(primary_key=True)
    token: Mapped[TokenId]
    expires: Mapped[float]


class Event(Base):
    """A line of the audit log: who wrote what, from where, when. `by`: a token or an attempt."""

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    by: Mapped[str | None]
    action: Mapped[str]
    subject: Mapped[str]
    address: Mapped[str]


_LIVE = text("state IN ('queued', 'running', 'preempted')")


class JobRow(Base):
    """A submitted tuning.

    Attributes:
        key: a digest of the request. At most one unfinished job has the same key.
        state: one of `advisor.jobs.spec.STATES`; `reason`: why, for people.
        what: the command or the target, for people; `asked`: the whole JobSpec, as JSON.
        archive: the digest of its code, or ''.
        changed: when the state last changed; `due`: the job does not start before this time.
        pause: seconds of its last delay, because it could not begin; 0 after a heartbeat.
        record: the id of the record that it made; '' until the job is done.
        attempts: the number of attempts; `started`: when the first one started.
        budget_s: time for measuring. tried: number of trials. batch: that of the first trial.
        speedup: of the record; until then, of the best trial at `batch`; 0 if unknown.
        logged: characters of its log.
    """

    __table_args__ = (
        Index("jobs_live", "key", unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE),
        Index("jobs_of_state", "state", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[Bytewise] = mapped_column(index=True)
    state: Mapped[str]
    reason: Mapped[str] = mapped_column(default="")
    what: Mapped[str]
    asked: Mapped[str]
    archive: Mapped[Bytewise] = mapped_column(index=True)
    gpu: Mapped[Bytewise]
    gpus: Mapped[int]
    token: Mapped[TokenId] = mapped_column(index=True)
    created: Mapped[float]
    changed: Mapped[float]
    due: Mapped[float] = mapped_column(default=0.0)
    pause: Mapped[float] = mapped_column(default=0.0)
    record: Mapped[str] = mapped_column(default="", index=True)
    attempts: Mapped[int] = mapped_column(default=0)
    started: Mapped[float | None]
    budget_s: Mapped[float]
    tried: Mapped[int] = mapped_column(default=0)
    batch: Mapped[int | None] = mapped_column(BigInteger)
    speedup: Mapped[float] = mapped_column(default=0.0)
    logged: Mapped[int] = mapped_column(default=0)


class Attempt(Base):
    """One start of a job on an executor.

    Attributes:
        external: the attempt's name at the executor, chosen before the start.
        device: the device that the worker uses, for people.
        beat: the time of the last heartbeat.
        start: the digest of its start token; `begun`: when that was exchanged for a token of its
            own, which is valid while the attempt runs; `digest`: of that token.
    """

    __table_args__ = (
        Index("attempts_of_job", "job", "number", unique=True),
        Index("attempts_of_state", "state", "executor"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[JobId]
    number: Mapped[int]
    executor: Mapped[str]
    external: Mapped[str]
    device: Mapped[str] = mapped_column(default="")
    state: Mapped[str]
    reason: Mapped[str] = mapped_column(default="")
    started: Mapped[float]
    beat: Mapped[float]
    ended: Mapped[float | None]
    start: Mapped[bytes] = mapped_column(unique=True)
    begun: Mapped[float | None]
    digest: Mapped[bytes | None] = mapped_column(unique=True)


class TrialRow(Base):
    """A config that an attempt tried. `batch` is None and `ratio` 0 if unknown; `outcome` is '' if
    it ran, else why it failed."""

    attempt: Mapped[AttemptId] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job: Mapped[JobId] = mapped_column(index=True)
    at: Mapped[float]
    what: Mapped[str]
    batch: Mapped[Large | None]
    samples_per_s: Mapped[float]
    ratio: Mapped[float]
    outcome: Mapped[str]
    origin: Mapped[str]


class Log(Base):
    """A piece of an attempt's output. The pieces of a job are in the order of their ids."""

    __table_args__ = (Index("logs_of_job", "job", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[JobId]
    attempt: Mapped[AttemptId]
    data: Mapped[str]


class Study(Base):
    """A search file of a job, so that the next attempt can continue the search."""

    __tablename__ = "studies"

    job: Mapped[JobId] = mapped_column(primary_key=True)
    name: Mapped[Bytewise] = mapped_column(primary_key=True)
    data: Mapped[bytes]


class Lookup(Base):
    """The number of equal lookups on a day. `day`: in days since 1970-01-01, UTC; `record_key`: the
    nearest record's, or ''; `model`: the start of the wanted fingerprint, or ''."""

    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    device: Mapped[Bytewise] = mapped_column(primary_key=True)
    record_key: Mapped[Bytewise] = mapped_column(primary_key=True)
    model: Mapped[Bytewise] = mapped_column(primary_key=True)
    outcome: Mapped[Bytewise] = mapped_column(primary_key=True)
    count: Mapped[Large]
