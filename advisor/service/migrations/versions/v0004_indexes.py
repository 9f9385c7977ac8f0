"""Indexes for what the pages ask of jobs and attempts; without one that no query used."""

from __future__ import annotations

from alembic import op

revision, down_revision = "0004", "0003"


def upgrade() -> None:
    op.create_index("jobs_of_record", "jobs", ["record"])
    op.create_index("jobs_of_token", "jobs", ["token"])
    op.create_index("attempts_of_started", "attempts", ["started"])
    op.drop_index("ix_events_at", "events")
