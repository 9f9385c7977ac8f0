"""The states of a job, for who asks for it and for the server that has it."""

from __future__ import annotations

from typing import Literal, get_args

State = Literal["queued", "preempted", "running", "done", "failed", "cancelled"]
STATES: tuple[State, ...] = get_args(State)
WAITING: tuple[State, ...] = ("queued", "preempted")
LIVE: tuple[State, ...] = (*WAITING, "running")
