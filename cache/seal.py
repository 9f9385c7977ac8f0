"""Signatures of records: a secret that a team shares, and whether records must carry it."""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path

from advisor.errors import UsageError

LEAST = 16
"""Characters of a secret: a shorter one can be guessed from one signed record."""
_PURPOSE = b"advisor record\n"


@dataclass(frozen=True, slots=True)
class Seal:
    """`secret`: empty for none; `required`: only records signed with it are accepted."""

    secret: bytes = field(default=b"", repr=False)
    required: bool = False

    def mac(self, payload: bytes) -> bytes:
        """HMAC-SHA256 (RFC 2104) of an encoded record, 32 bytes."""
        return hmac.digest(self.secret, _PURPOSE + payload, hashlib.sha256)

    @classmethod
    def from_environment(cls) -> Seal:
        """$ADVISOR_SECRET, or what is in the file $ADVISOR_SECRET_FILE; $ADVISOR_SIGNED_ONLY.

        Raises:
            UsageError: the secret is too short, its file cannot be read, or one is missing.
        """
        secret = os.environ.get("ADVISOR_SECRET", "")
        if file := os.environ.get("ADVISOR_SECRET_FILE", ""):
            try:
                secret = Path(file).read_text().strip()
            except (OSError, UnicodeError) as exc:
                raise UsageError(f"ADVISOR_SECRET_FILE {file!r}: cannot be read ({exc})") from exc
        required = os.environ.get("ADVISOR_SIGNED_ONLY", "") not in ("", "0")
        if secret and len(secret) < LEAST:
            raise UsageError(
                f"ADVISOR_SECRET: {len(secret)} characters, expected at least {LEAST}; "
                "e.g. what `openssl rand -hex 32` prints"
            )
        if required and not secret:
            raise UsageError(
                "ADVISOR_SIGNED_ONLY is set and no secret is: set ADVISOR_SECRET or "
                "ADVISOR_SECRET_FILE"
            )
        return cls(secret.encode(), required)


UNSEALED = Seal()
