"""Start tokens of attempts; the batch of a trial."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("start", sa.LargeBinary(), nullable=True))
    op.add_column("attempts", sa.Column("begun", sa.Double(), nullable=True))
    op.create_index("attempts_of_start", "attempts", ["start"], unique=True)
    op.add_column("trials", sa.Column("batch", sa.BigInteger(), nullable=True))
