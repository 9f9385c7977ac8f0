"""Signatures of records: whose word counts when several have written of the same thing.

Two keys sign. Each user has one of their own, made at the first write: 32 random bytes that only
they can read, in $XDG_DATA_HOME/advisor/key. A team may share a secret: it is preferred then, and
what any of the team measured counts for all of them. What neither signed, anybody who can write to
a store may have made up: it is served where nothing better is there, and decides over nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import logging
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from advisor.cache.stores.filesystem import make_folder, open_regular
from advisor.errors import UsageError

_log = logging.getLogger("advisor")

UNSIGNED = "unsigned"
"""What is said, wherever it is shown or served, of a record that no key of the reader signed."""
LEAST = 16
"""Characters of a secret: a shorter one can be guessed from one signed record."""
RECORD, ARTIFACTS = b"advisor record\n", b"advisor artifacts\n"
"""What a signature is of: one of the one kind is none of the other."""
_NAME = b"advisor name\n"
_OWN_BYTES = 32
_MOST_BYTES = 2**12


@dataclass(frozen=True, slots=True)
class Seal:
    """The keys that sign, and whether what they did not sign is refused.

    Attributes:
        secret: the team's, empty for none.
        own: this user's, empty where none was made yet.
        required: only records signed with one of them are accepted.
        own_file: where `ready` keeps the user's own; None for nowhere.
    """

    secret: bytes = field(default=b"", repr=False)
    required: bool = False
    own: bytes = field(default=b"", repr=False)
    own_file: Path | None = None

    @property
    def signs(self) -> bytes:
        """The key that new records are signed with: the team's, else the user's own."""
        return self.secret or self.own

    def mac(self, payload: bytes, of: bytes = RECORD) -> bytes:
        """HMAC-SHA256 (RFC 2104) of an encoded record, or of ARTIFACTS, 32 bytes."""
        return hmac.digest(self.signs, of + payload, hashlib.sha256)

    def made(self, mac: bytes, payload: bytes, of: bytes = RECORD) -> bool:
        """Whether one of the keys made this signature."""
        return any(
            hmac.compare_digest(mac, hmac.digest(key, of + payload, hashlib.sha256))
            for key in (self.secret, self.own)
            if key
        )

    def tag(self, name: str) -> str:
        """12 hex characters that show, in a listing, that the keys' owner gave this name."""
        return _tag(self.signs, name)

    def tags(self, name: str) -> tuple[str, ...]:
        """Those of each key, the team's first."""
        return tuple(_tag(key, name) for key in (self.secret, self.own) if key)

    def tagged(self, name: str, tag: str) -> bool:
        """Whether one of the keys made this tag."""
        return any(hmac.compare_digest(tag, one) for one in self.tags(name))

    def ready(self) -> Seal:
        """With a key to sign with, made now where there is none; as it is where that fails."""
        if self.signs or self.own_file is None:
            return self
        try:
            return dataclasses.replace(self, own=_made(self.own_file))
        except OSError as exc:
            _log.warning("%s: no key of your own can be kept (%s); not signed", self.own_file, exc)
            return self

    @classmethod
    def from_environment(cls) -> Seal:
        """$ADVISOR_SECRET, or what is in the file $ADVISOR_SECRET_FILE; $ADVISOR_SIGNED_ONLY; the
        user's own key where one was made. A file that others can read is told in the log.

        Raises:
            UsageError: the secret is too short, its file cannot be read, or one is missing.
        """
        secret = os.environ.get("ADVISOR_SECRET", "")
        if file := os.environ.get("ADVISOR_SECRET_FILE", ""):
            try:
                secret = _read(Path(file)).decode().strip()
            except (OSError, ValueError) as exc:
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
        folder, own = own_folder(), b""
        own_file = None if folder is None else folder / "key"
        if own_file is not None:
            with contextlib.suppress(OSError, ValueError):
                own = _read(own_file)
        if len(own) != _OWN_BYTES:
            own = b""
        return cls(os.fsencode(secret), required, own, own_file)


UNSEALED = Seal()


@functools.lru_cache(maxsize=1024)
def _tag(key: bytes, name: str) -> str:
    return hmac.digest(key, _NAME + name.encode(), hashlib.sha256).hex()[:12] if key else ""


def own_folder() -> Path | None:
    """For what is the user's own and no cache, as the XDG base directories have it; None for a user
    without a home."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    path = Path(os.path.expanduser(data))  # noqa: PTH111 # Path's raises for a user without an entry
    return path / "advisor" if path.is_absolute() else None


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        mode = os.fstat(file.fileno()).st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            _tell_once(str(path), mode & 0o777)
        return file.read(_MOST_BYTES)


@functools.cache
def _tell_once(path: str, mode: int) -> None:
    _log.warning(
        "%s holds a secret and others can read it (mode %o); run: chmod 600 it", path, mode
    )


def _made(path: Path) -> bytes:
    """A new key in its file; another process's where that was first."""
    make_folder(path.parent)
    temporary = path.with_name(f".key-{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_OWN_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # fails where it is there, unlike a rename
    finally:
        temporary.unlink(missing_ok=True)
    found = _read(path)
    if len(found) != _OWN_BYTES:
        raise OSError(f"expected {_OWN_BYTES} bytes, got {len(found)}; remove it")
    return found
