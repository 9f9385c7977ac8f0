"""What was compiled for records."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0006", "0005"
BYTEWISE = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
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
