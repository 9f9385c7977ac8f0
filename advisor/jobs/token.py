"""A token: 256 random bits as text, of which a server keeps the SHA-256 alone."""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "adv_"


def made() -> str:
    """A new one."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(text: str) -> bytes:
    """SHA-256, without a salt: of 256 random bits nothing can be guessed."""
    return hashlib.sha256(text.encode()).digest()
