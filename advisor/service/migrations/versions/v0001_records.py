"""Records, tokens, sessions, the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None
BYTEWISE = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "schema",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
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
    op.create_index("ix_events_at", "events", ["at"])
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
        sa.Column("device", BYTEWISE, nullable=False),
        sa.Column("fields", sa.String(), nullable=False),
        sa.Column("speedup", sa.Double(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("stored", sa.Double(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"]),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_index("items_of_id", "items", ["id", "batch"])
    op.create_index("items_of_model", "items", ["model"])
    op.create_index("items_of_origin", "items", ["origin"])
    op.create_index("items_of_target", "items", ["target"])
    op.create_index("ix_items_device", "items", ["device"])
    op.create_index("ix_items_file", "items", ["file"])
    op.create_index("ix_items_place", "items", ["place"])
    op.create_table(
        "sessions",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"]),
        sa.PrimaryKeyConstraint("digest"),
    )
