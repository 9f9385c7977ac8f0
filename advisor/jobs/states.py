"""The states of a job, for who asks for it and for the server that has it."""

from __future__ import annotations

WAITING = ("queued", "preempted")
LIVE = (*WAITING, "running")
STATES = (*LIVE, "done", "failed", "cancelled")
