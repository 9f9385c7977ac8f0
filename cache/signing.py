"""Keys that sign records, and so decide whose record counts if several people wrote the record.

Each user has a key of their own, made at the first write: 32 random bytes that only they can read,
in $XDG_DATA_HOME/advisor/key. A secret that a team shares signs instead. A record that neither key
signed is served only if there is none that is signed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from advisor.cache.settings import is_on
from advisor.cache.stores.filesystem import make_folder, open_regular
from advisor.errors import UsageError, reason

_log = logging.getLogger("advisor")

UNSIGNED = "unsigned"  # shown for a record that no key of the reader signed
MIN_SECRET = 16  # characters: a shorter secret can be guessed from one signed record
RECORD, ARTIFACTS, NAME = b"advisor record\n", b"advisor artifacts\n", b"advisor name\n"
"""Prefixes of signed data, so that a signed record cannot pass for signed code."""
_OWN_BYTES = 32
_MAX_BYTES = 2**12


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys that sign, and whether unsigned records are refused.

    Attributes:
        secret: the team's key, empty for none; `own`: the user's, empty if none was made yet.
        required: only records that one of these keys signed are accepted.
        own_file: where `ready` keeps the user's own key; None for nowhere.
        secret_exposed, own_exposed: how another user could read or set the key, or ''.
    """

    secret: bytes = field(default=b"", repr=False)
    required: bool = False
    own: bytes = field(default=b"", repr=False)
    own_file: Path | None = None
    secret_exposed: str = ""
    own_exposed: str = ""

    @property
    def for_code(self) -> KeyRing:
        """Only the keys that no other user can have, because code that they sign is run."""
        return dataclasses.replace(
            self,
            secret=b"" if self.secret_exposed else self.secret,
            own=b"" if self.own_exposed else self.own,
        )

    @property
    def exposed(self) -> str:
        """Why one of the keys may not sign code; '' if all may."""
        return self.secret_exposed or self.own_exposed

    @property
    def signs(self) -> bytes:
        """The key that signs new records: the team's, else the user's own."""
        return self.secret or self.own

    def sign(self, payload: bytes, of: bytes = RECORD) -> bytes:
        """HMAC-SHA256 (RFC 2104), 32 bytes; `of` tells records from compiled artifacts."""
        return hmac.digest(self.signs, of + payload, hashlib.sha256)

    def verify(self, signature: bytes, payload: bytes, of: bytes = RECORD) -> bool:
        keys = filter(None, (self.secret, self.own))
        made = (hmac.digest(key, of + payload, hashlib.sha256) for key in keys)
        return any(hmac.compare_digest(signature, one) for one in made)

    def tags(self, name: str) -> tuple[str, ...]:
        """A tag (12 hex characters) by each key, the team's first. It proves that the key's owner
        made the name."""
        return tuple(_tag(key, name) for key in (self.secret, self.own) if key)

    def tagged(self, name: str) -> str:
        """The name with its tag; unchanged if there is no key."""
        return ".".join((name, *self.tags(name)[:1]))

    def trusts(self, text: str) -> bool:
        """Whether a name ends in the tag of one of the keys."""
        name, _, tag = text.rpartition(".")
        return any(hmac.compare_digest(tag, one) for one in self.tags(name))

    def ready(self) -> KeyRing:
        """A keyring that can sign: if it has no key, one is made for the user and saved."""
        if not self.signs and self.own_file is not None:
            try:
                own, why = _make_key(self.own_file)
                return dataclasses.replace(self, own=own, own_exposed=why)
            except OSError as exc:
                _log.warning("%s: your key cannot be saved (%s): unsigned", self.own_file, exc)
        return self

    @classmethod
    def from_environment(cls) -> KeyRing:
        """$ADVISOR_SECRET or the file $ADVISOR_SECRET_FILE, $ADVISOR_SIGNED_ONLY, and the user's
        own key if it was made. The group of the secret's file, the team, may read it. UsageError
        says what is wrong with the secret."""
        secret, secret_exposed = os.environ.get("ADVISOR_SECRET", ""), ""
        if path := os.environ.get("ADVISOR_SECRET_FILE", ""):
            try:
                data, secret_exposed = _read(Path(path), group_reads=True)
                secret = data.decode().strip()
            except (OSError, ValueError) as exc:
                raise UsageError(
                    f"ADVISOR_SECRET_FILE {path!r}: cannot be read ({reason(exc)})"
                ) from exc
        required = is_on("ADVISOR_SIGNED_ONLY")
        if secret and len(secret) < MIN_SECRET:
            raise UsageError(
                f"ADVISOR_SECRET: {len(secret)} characters, expected at least {MIN_SECRET}; "
                "e.g. what `openssl rand -hex 32` prints"
            )
        if required and not secret:
            raise UsageError(
                "ADVISOR_SIGNED_ONLY is set and no secret is: set ADVISOR_SECRET or "
                "ADVISOR_SECRET_FILE"
            )
        own, own_exposed = b"", ""
        file = folder / "key" if (folder := own_folder()) else None
        with contextlib.suppress(OSError, ValueError):
            own, own_exposed = _read_own(file) if file else (b"", "")
        return cls(os.fsencode(secret), required, own, file, secret_exposed, own_exposed)


NO_KEYS = KeyRing()


@functools.lru_cache(maxsize=1024)
def _tag(key: bytes, name: str) -> str:
    return hmac.digest(key, NAME + name.encode(), hashlib.sha256).hex()[:12]


def own_folder() -> Path | None:
    """The user's folder for data that is no cache ($XDG_DATA_HOME); None without a home."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    path = Path(os.path.expanduser(data))  # noqa: PTH111 # Path's raises for a user without an entry
    return path / "advisor" if path.is_absolute() else None


def _read(path: Path, group_reads: bool = False) -> tuple[bytes, str]:
    """The content of a file, and how another user could have read or set it, or ''."""
    with open_regular(path) as file:
        why = insecure_reason(path, file.fileno(), group_reads)
        if why:
            _warn_once(str(path), why)
        return file.read(_MAX_BYTES), why


def _read_own(path: Path) -> tuple[bytes, str]:
    """As `_read`. Raises OSError if the file is no key."""
    found, why = _read(path)
    if len(found) != _OWN_BYTES:
        raise OSError(f"expected {_OWN_BYTES} bytes, got {len(found)}; remove it")
    return found, why


@functools.cache
def _warn_once(path: str, why: str) -> None:
    remedy = "run chmod 600 on the file, and chmod go-w on the folders above it"
    _log.warning("the secret in %s is not safe: %s; %s", path, why, remedy)


def _make_key(path: Path) -> tuple[bytes, str]:
    """Make a new key in its file, unless another process just made one. Returns as `_read`."""
    make_folder(path.parent)
    temporary = path.with_name(f".key-{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_OWN_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # fails if it exists, unlike a rename
    finally:
        temporary.unlink(missing_ok=True)
    return _read_own(path)


def insecure_reason(path: Path, descriptor: int, group_reads: bool = False) -> str:
    """How another user except root could have read or set an open file, like StrictModes of
    sshd_config(5); '' if nobody could. With `group_reads`, the file's group may read it."""
    if not hasattr(os, "geteuid"):
        return ""
    try:
        found = last = os.fstat(descriptor)
        for step in _steps(path.absolute()):
            last = step.lstat()
            if fault := _fault(step, last):
                return fault
    except OSError as exc:
        return f"{path}: {reason(exc)}"
    if not os.path.samestat(found, last):
        return f"{path} was replaced while it was read"
    readers = stat.S_IROTH if group_reads else stat.S_IRGRP | stat.S_IROTH
    if found.st_mode & readers:
        return f"others can read {path} (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _fault(step: Path, found: os.stat_result) -> str:
    """How another user could replace one step of the path; '' if nobody could."""
    if found.st_uid not in (0, os.geteuid()):
        return f"{step} is another user's ({found.st_uid})"
    if stat.S_ISLNK(found.st_mode):
        return ""
    mode = stat.S_IMODE(found.st_mode)
    writers = mode & (stat.S_IWGRP | stat.S_IWOTH)
    own = mode & stat.S_ISVTX or (writers == stat.S_IWGRP and _is_private(found.st_gid))
    if not writers or (stat.S_ISDIR(found.st_mode) and own):
        return ""
    return f"others can write {step} (mode {mode:o})"


def _is_private(gid: int) -> bool:
    """Whether a group has no other member, as many systems make one for each user."""
    import grp
    import pwd

    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _steps(path: Path, links: int = 40) -> Iterator[Path]:
    """Each folder and link on the path to a file, from the root on; the file itself is the last."""
    here = Path(path.anchor)
    yield here
    for part in path.parts[1:]:
        step = here.parent if part == ".." else here / part
        yield step
        if step.is_symlink():
            if not links:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            yield from _steps(here / step.readlink(), links - 1)
            step = step.resolve()
        here = step
