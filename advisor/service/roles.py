"""The roles of tokens. The command line imports this without the server's libraries."""

from collections.abc import Mapping
from typing import Literal, get_args

Role = Literal["read", "submit", "worker", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each role may also do all that the roles before it may do."""
MAY: Mapping[Role, str] = {
    "read": "Look up records and see the pages. For runs that only use records.",
    "submit": "Submit jobs and cancel own jobs. Submitted code runs on your machines: give this "
    "role to people who may log in there anyway.",
    "worker": "Write records and remove own records. For machines that measure.",
    "admin": "Make and revoke tokens, read the audit log, cancel any job, remove any record.",
}
