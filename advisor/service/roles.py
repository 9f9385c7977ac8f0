"""What a token may do; the command line has it without the server's libraries."""

from collections.abc import Mapping
from typing import Literal, get_args

Role = Literal["read", "submit", "worker", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each may do all that the one before it may."""
MAY: Mapping[Role, str] = {
    "read": "Look up records and see the pages. For runs that only use records.",
    "submit": "Submit jobs and cancel its own. Its code runs on your machines: give it to people "
    "who may log in there anyway.",
    "worker": "Write records and remove its own. For machines that measure.",
    "admin": "Make and revoke tokens, read the audit log, cancel any job, remove any record.",
}
