"""What a token may do; the command line has it without the server's libraries."""

from typing import Literal, get_args

Role = Literal["read", "submit", "worker", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each may do all that the one before it may: look up; ask for tunings; write records; make tokens.
"""
