"""All tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None
BYTEWISE = sa.String().with_variant(sa.String(collation="C"), "postgresql")
LIVE = sa.text("state IN ('queued', 'running', 'preempted')")


def upgrade() -> None:
    op.create_table(
        "lookups",
        sa.Column("day", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("device", BYTEWISE, nullable=False),
        sa.Column("place", BYTEWISE, nullable=False),
        sa.Column("model", BYTEWISE, nullable=False),
        sa.Column("outcome", BYTEWISE, nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("day", "device", "place", "model", "outcome"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=True),
        sa.Column("revoked", sa.Double(), nullable=True),
        sa.Column("used", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("digest"),
    )
    op.create_table(
        "archives",
        sa.Column("digest", BYTEWISE, nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("used", sa.Double(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"]),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_index("archives_of_token", "archives", ["token", "size"])
    op.create_table(
        "artifacts",
        sa.Column("name", BYTEWISE, nullable=False),
        sa.Column("place", BYTEWISE, nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("stored", sa.Double(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"]),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_index("artifacts_of_token", "artifacts", ["token", "size"])
    op.create_table(
        "events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=True),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "items",
        sa.Column("key", BYTEWISE, nullable=False),
        sa.Column("place", BYTEWISE, nullable=False),
        sa.Column("model", BYTEWISE, nullable=False),
        sa.Column("id", BYTEWISE, nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("target", BYTEWISE, nullable=False),
        sa.Column("origin", BYTEWISE, nullable=False),
        sa.Column("called", sa.String(), nullable=False),
        sa.Column("file", BYTEWISE, nullable=False),
        sa.Column("code", BYTEWISE, server_default=sa.text("''"), nullable=False),
        sa.Column("family", BYTEWISE, server_default=sa.text("''"), nullable=False),
        sa.Column("command", BYTEWISE, server_default=sa.text("''"), nullable=False),
        sa.Column("device", BYTEWISE, nullable=False),
        sa.Column("fields", sa.String(), nullable=False),
        sa.Column("terms", BYTEWISE, server_default=sa.text("''"), nullable=False),
        sa.Column("speedup", sa.Double(), nullable=False),
        sa.Column("trust", BYTEWISE, server_default=sa.text("''"), nullable=False),
        sa.Column("framework", BYTEWISE, server_default=sa.text("''"), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("stored", sa.Double(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"]),
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
    op.create_index(op.f("ix_items_device"), "items", ["device"])
    op.create_index(op.f("ix_items_place"), "items", ["place"])
    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", BYTEWISE, nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("what", sa.String(), nullable=False),
        sa.Column("asked", sa.String(), nullable=False),
        sa.Column("archive", BYTEWISE, nullable=False),
        sa.Column("gpu", BYTEWISE, nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("changed", sa.Double(), nullable=False),
        sa.Column("due", sa.Double(), nullable=False),
        sa.Column("record", sa.String(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("logged", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"]),
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
        "sessions",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"]),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_table(
        "attempts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("executor", sa.String(), nullable=False),
        sa.Column("external", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("started", sa.Double(), nullable=False),
        sa.Column("beat", sa.Double(), nullable=False),
        sa.Column("ended", sa.Double(), nullable=True),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("start", sa.LargeBinary(), nullable=False),
        sa.Column("begun", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"]),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("token"),
    )
    op.create_index("attempts_of_job", "attempts", ["job", "number"], unique=True)
    op.create_index("attempts_of_start", "attempts", ["start"], unique=True)
    op.create_index("attempts_of_state", "attempts", ["state", "executor"])
    op.create_table(
        "studies",
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("name", BYTEWISE, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job", "name"),
    )
    op.create_table(
        "logs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("data", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["attempt"], ["attempts.id"]),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("logs_of_job", "logs", ["job", "id"])
    op.create_table(
        "trials",
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("what", sa.String(), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=True),
        sa.Column("samples_per_s", sa.Double(), nullable=False),
        sa.Column("ratio", sa.Double(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("origin", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["attempt"], ["attempts.id"]),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("attempt", "number"),
    )
    op.create_index("trials_of_job", "trials", ["job"])
