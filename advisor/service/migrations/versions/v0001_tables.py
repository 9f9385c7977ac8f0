"""The first tables, which `upgrade` makes from `schema`."""

from __future__ import annotations

revision, down_revision = "0001", None


def upgrade() -> None:
    """Do nothing: no older database exists."""
