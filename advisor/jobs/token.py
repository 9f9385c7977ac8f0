"""A token is 256 random bits as text. A server stores only its SHA-256."""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "adv_"


def made() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(text: str) -> bytes:
    """SHA-256 without a salt, because nobody can guess 256 random bits."""
    return hashlib.sha256(text.encode()).digest()
