"""All tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None
BYTEWISE = sa.String().with_variant(sa.String(collation="C"), "postgresql")
LIVE = sa.text("state IN ('queued', 'running', 'preempted')")


def columns(kind: Any, *names: str, **how: Any) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, **{"nullable": False, **how}) for name in names]


def references(**tables: str) -> list[sa.ForeignKeyConstraint]:
    return [sa.ForeignKeyConstraint([name], [f"{table}.id"]) for name, table in tables.items()]


def upgrade() -> None:
    _people()
    _records()
    _jobs()
    _attempts()


def _people() -> None:
    op.create_table(
        "tokens",
        *columns(sa.Integer(), "id"),
        *columns(sa.LargeBinary(), "digest"),
        *columns(sa.String(), "name", "role"),
        *columns(sa.Double(), "created"),
        *columns(sa.Double(), "expires", "revoked", "used", nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("digest"),
    )
    op.create_table(
        "sessions",
        *columns(sa.LargeBinary(), "digest"),
        *columns(sa.Integer(), "token"),
        *columns(sa.Double(), "expires"),
        *references(token="tokens"),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_table(
        "events",
        *columns(sa.Integer(), "id"),
        *columns(sa.Double(), "at"),
        *columns(sa.Integer(), "token", nullable=True),
        *columns(sa.String(), "action", "subject", "address"),
        *references(token="tokens"),
        sa.PrimaryKeyConstraint("id"),
    )


def _records() -> None:
    op.create_table(
        "items",
        *columns(BYTEWISE, "key", "place", "model", "id", "target", "origin", "file", "device"),
        *columns(sa.BigInteger(), "batch"),
        *columns(sa.String(), "called", "fields"),
        *columns(
            BYTEWISE,
            "code",
            "family",
            "command",
            "terms",
            "trust",
            "framework",
            server_default=sa.text("''"),
        ),
        *columns(sa.Double(), "speedup", "created", "stored"),
        *columns(sa.Integer(), "size", "token"),
        *columns(sa.LargeBinary(), "data"),
        *references(token="tokens"),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_index("items_of_code", "items", ["code", "target", "terms", "created"])
    op.create_index("items_of_command", "items", ["command", "terms", "created"])
    op.create_index("items_of_family", "items", ["family", "terms", "created"])
    op.create_index("items_of_file", "items", ["file", "terms", "created"])
    op.create_index("items_of_id", "items", ["id", "batch"])
    op.create_index("items_of_model", "items", ["model", "terms", "created"])
    op.create_index("items_of_origin", "items", ["origin", "target", "terms", "created"])
    op.create_index("items_of_target", "items", ["target", "terms", "created"])
    op.create_index("items_of_token", "items", ["token", "size"])
    op.create_index("ix_items_device", "items", ["device"])
    op.create_index("ix_items_place", "items", ["place"])
    op.create_table(
        "artifacts",
        *columns(BYTEWISE, "name", "place"),
        *columns(sa.Integer(), "size", "token"),
        *columns(sa.Double(), "stored"),
        *columns(sa.LargeBinary(), "data"),
        *references(token="tokens"),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_index("artifacts_of_token", "artifacts", ["token", "size"])
    op.create_table(
        "lookups",
        *columns(sa.Integer(), "day"),
        *columns(BYTEWISE, "device", "place", "model", "outcome"),
        *columns(sa.BigInteger(), "count"),
        sa.PrimaryKeyConstraint("day", "device", "place", "model", "outcome"),
    )


def _jobs() -> None:
    op.create_table(
        "jobs",
        *columns(sa.Integer(), "id", "gpus", "token", "attempts", "logged"),
        *columns(BYTEWISE, "key", "archive", "gpu"),
        *columns(sa.String(), "state", "reason", "what", "asked", "record"),
        *columns(sa.Double(), "created", "changed", "due"),
        *references(token="tokens"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "jobs_live", "jobs", ["key"], unique=True, sqlite_where=LIVE, postgresql_where=LIVE
    )
    op.create_index("jobs_of_archive", "jobs", ["archive"])
    op.create_index("jobs_of_key", "jobs", ["key"])
    op.create_index("jobs_of_record", "jobs", ["record"])
    op.create_index("jobs_of_state", "jobs", ["state", "id"])
    op.create_index("jobs_of_token", "jobs", ["token"])
    op.create_table(
        "archives",
        *columns(BYTEWISE, "digest"),
        *columns(sa.Integer(), "size", "token"),
        *columns(sa.Double(), "created", "used"),
        *columns(sa.LargeBinary(), "data"),
        *references(token="tokens"),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_index("archives_of_token", "archives", ["token", "size"])
    op.create_table(
        "studies",
        *columns(sa.Integer(), "job"),
        *columns(BYTEWISE, "name"),
        *columns(sa.LargeBinary(), "data"),
        *references(job="jobs"),
        sa.PrimaryKeyConstraint("job", "name"),
    )


def _attempts() -> None:
    op.create_table(
        "attempts",
        *columns(sa.Integer(), "id", "job", "number", "token"),
        *columns(sa.String(), "executor", "external", "device", "state", "reason"),
        *columns(sa.Double(), "started", "beat"),
        *columns(sa.Double(), "ended", "begun", nullable=True),
        *columns(sa.LargeBinary(), "start"),
        *references(job="jobs", token="tokens"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("token"),
    )
    op.create_index("attempts_of_job", "attempts", ["job", "number"], unique=True)
    op.create_index("attempts_of_start", "attempts", ["start"], unique=True)
    op.create_index("attempts_of_state", "attempts", ["state", "executor"])
    op.create_table(
        "trials",
        *columns(sa.Integer(), "attempt", "number", "job"),
        *columns(sa.Double(), "at", "samples_per_s", "ratio"),
        *columns(sa.String(), "what", "outcome", "origin"),
        *columns(sa.BigInteger(), "batch", nullable=True),
        *references(attempt="attempts", job="jobs"),
        sa.PrimaryKeyConstraint("attempt", "number"),
    )
    op.create_index("trials_of_job", "trials", ["job"])
    op.create_table(
        "logs",
        *columns(sa.Integer(), "id", "job", "attempt"),
        *columns(sa.String(), "data"),
        *references(job="jobs", attempt="attempts"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("logs_of_job", "logs", ["job", "id"])
