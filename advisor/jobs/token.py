"""Tokens and their roles. A token is 256 random bits as text, of which a server stores only the
SHA-256."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Literal, get_args

TOKEN_PREFIX = "adv_"
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


def made() -> str:
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def digest(text: str) -> bytes:
    """SHA-256 without a salt, because nobody can guess 256 random bits."""
    return hashlib.sha256(text.encode()).digest()
