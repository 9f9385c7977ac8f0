"""A folder's code as one archive: packed where a tuning is asked for, unpacked where it runs.

A tar.gz of files and of links that stay inside; never a pickle. The same tree makes the same bytes,
of whatever commit.
In a git checkout that is what git tracks, as it lies there now, and what git does not ignore; in
any other folder all but DEFAULTS. What .advisorignore names, as .gitignore would, stays at home.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import itertools
import os
import stat
import subprocess
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from advisor.cache.shown import size
from advisor.cache.stores.timeout import check_deadline
from advisor.errors import StoreError, UsageError, printable

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

NEEDS_CODE = 428
"""HTTP's status for what is asked of a server that has not the code for it: it is sent first."""
MOST_PACKED = 32 * 2**20
MOST_UNPACKED = 256 * 2**20
MOST_FILES = 20_000
IGNORE = ".advisorignore"
DEFAULTS = """
.git/ .hg/ .svn/ .venv/ venv/ .tox/ .nox/ node_modules/ site-packages/
__pycache__/ *.py[co] *.egg-info/ .mypy_cache/ .pytest_cache/ .ruff_cache/ .ipynb_checkpoints/
.cache/ .idea/ .vscode/ .DS_Store wandb/ mlruns/ lightning_logs/
.env .env.* .netrc *.pem *.key id_rsa id_ed25519
"""
"""Of what git does not track: never code, or a secret."""
DATA = "*.pt *.pth *.ckpt *.safetensors *.bin *.onnx *.npy *.npz *.h5 *.parquet *.tar *.zip"
LARGE = 2**20
"""Bytes from which DATA that git does not track stays at home."""
_NAMED = 5
"""Files that a refusal names."""
_MOST_NAME, _MOST_PART = 1024, 255
_MOST_READ = 2**20
"""Bytes that tarfile may ask for at once: a header of an archive can claim any size."""
_HEADERS = 4096
"""Bytes of headers and padding that a member may have, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Code that can travel.

    Attributes:
        digest: SHA-256 of the archive, as hex.
        root: the folder that was packed: of a git checkout its top.
        size: bytes of the files, unpacked.
        commit: that they were made from; '' where there is none.
        dirty: whether they differ from it.
        left_out: what stays at home, each as 'name: why'.
    """

    archive: bytes
    digest: str
    root: Path
    files: int
    size: int
    commit: str
    dirty: bool
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Tree:
    """Names of files below `root`, `untracked` those that git does not know."""

    root: Path
    tracked: Sequence[str] = ()
    untracked: Iterable[str] = ()
    commit: str = ""
    dirty: bool = False


@dataclass(frozen=True, slots=True)
class _Entry:
    """`target`: of a link."""

    name: str
    size: int
    executable: bool = False
    target: str = ""


def pack(folder: Path) -> Parcel:
    """The code that a command in this folder needs, as far as it lies there.

    Raises:
        UsageError: it is too much, cannot be read, or is the whole home folder.
    """
    left_out: dict[str, str] = {}
    try:
        tree = _checkout(folder.resolve()) or _plain(folder.resolve(), left_out)
        chosen = itertools.islice(_chosen(tree, left_out), 4 * MOST_FILES)
        entries = sorted(chosen, key=lambda one: one.name)
        _holds(tree.root, entries)
        archive = _archived(tree, entries)
    except OSError as exc:
        raise UsageError(f"{exc.filename or folder}: cannot be read ({exc.strerror})") from exc
    return Parcel(
        archive=archive,
        digest=hashlib.sha256(archive).hexdigest(),
        root=tree.root,
        files=len(entries),
        size=sum(one.size for one in entries),
        commit=tree.commit,
        dirty=tree.dirty,
        left_out=tuple(printable(f"{name}: {why}") for name, why in sorted(left_out.items())),
    )


def _plain(root: Path, left_out: dict[str, str]) -> _Tree:
    if _is_a_home(root):
        raise UsageError(f"{root}: is no project's folder; its files are not sent anywhere")
    return _Tree(root, untracked=_walked(root, left_out))


def _is_a_home(folder: Path) -> bool:
    """Whether it is the user's home, or a folder above it."""
    try:
        return Path.home().resolve().is_relative_to(folder)
    except RuntimeError:  # there is none
        return False


def _checkout(folder: Path) -> _Tree | None:
    """What git says of the folder; None where it is in no checkout, or in that of a whole home.

    Raises:
        UsageError: it is in one, and git does not say what it ignores.
    """
    try:
        root = Path(os.fsdecode(_git(folder, "rev-parse", "--show-toplevel")).rstrip("\n"))
    except (FileNotFoundError, NotADirectoryError) as exc:
        if _is_in_checkout(folder):
            raise UsageError(
                f"{folder}: is a git checkout's, and only git knows what it ignores; install git"
            ) from exc
        return None
    except subprocess.CalledProcessError as exc:
        if _is_in_checkout(folder):
            raise _failed(folder, exc) from exc
        return None
    if _is_a_home(root):
        return None
    commit = ""
    with contextlib.suppress(subprocess.CalledProcessError):  # there is none yet
        commit = _git(root, "rev-parse", "--verify", "-q", "HEAD").decode().strip()
    try:
        return _Tree(
            root=root,
            tracked=_names(_git(root, "ls-files", "-z", "-c", "--recurse-submodules")),
            untracked=_names(_git(root, "ls-files", "-z", "-o", "--exclude-standard")),
            commit=commit,
            dirty=bool(_git(root, "status", "--porcelain", "-z")),
        )
    except subprocess.CalledProcessError as exc:
        raise _failed(root, exc) from exc


def _is_in_checkout(folder: Path) -> bool:
    """Whether it looks so, without git; that of a whole home is none."""
    within = itertools.takewhile(lambda one: not _is_a_home(one), (folder, *folder.parents))
    return any((one / ".git").exists() for one in within)


def _failed(folder: Path, exc: subprocess.CalledProcessError) -> UsageError:
    said = printable(" ".join(exc.stderr.decode(errors="replace").split()))
    return UsageError(f"{folder}: git {exc.cmd[3]} failed ({said})")


def _git(folder: Path, *words: str) -> bytes:
    return subprocess.run(
        ["git", "-C", folder, *words],
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    ).stdout


def _names(listed: bytes) -> list[str]:
    return [os.fsdecode(name) for name in listed.split(b"\0") if name]


def _walked(root: Path, left_out: dict[str, str]) -> Iterator[str]:
    """The files of a folder that git does not know; nothing is looked for in what is ignored."""
    default, own = _spec(DEFAULTS.split()), _own(root)
    for place, folders, files in os.walk(root, onerror=_raise):
        check_deadline()
        below = PurePosixPath(Path(place).relative_to(root).as_posix())
        for name in list(folders):
            path = str(below / name)
            if Path(place, name).is_symlink():
                files.append(name)
            elif default.match_file(f"{path}/") or own.match_file(f"{path}/"):
                left_out[f"{path}/"] = "ignored"
            else:
                continue
            folders.remove(name)
        yield from (str(below / name) for name in files)


def _raise(exc: OSError) -> None:
    raise exc


def _spec(lines: Iterable[str]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(lines)


def _own(root: Path) -> GitIgnoreSpec:
    """What .advisorignore leaves out.

    Raises:
        UsageError: it is no ignore file.
    """
    try:
        lines = (root / IGNORE).read_text().splitlines()
    except FileNotFoundError:
        lines = []
    except ValueError as exc:
        raise UsageError(f"{root / IGNORE}: is no text ({exc})") from exc
    try:
        return _spec(lines)
    except ValueError as exc:
        raise UsageError(f"{root / IGNORE}: {exc}") from exc


def _chosen(tree: _Tree, left_out: dict[str, str]) -> Iterator[_Entry]:
    """What travels; into `left_out` goes what does not."""
    default, own, data = _spec(DEFAULTS.split()), _own(tree.root), _spec(DATA.split())
    known = set(tree.tracked)
    real: dict[str, bool] = {}
    for name in (*sorted(known), *tree.untracked):
        above = os.path.dirname(tree.root / name)  # noqa: PTH120 # once a file
        if above not in real:
            real[above] = os.path.realpath(above) == above
        try:
            about = (tree.root / name).lstat()
        except (FileNotFoundError, NotADirectoryError):  # tracked, and removed in the work tree
            continue
        if not real[above]:
            continue
        free = name not in known
        target = str((tree.root / name).readlink()) if stat.S_ISLNK(about.st_mode) else ""
        if own.match_file(name) or (free and default.match_file(name)):
            left_out[name] = "ignored"
        elif free and about.st_size > LARGE and data.match_file(name):
            left_out[name] = f"{size(about.st_size)} of data"
        elif not _is_plain(name):
            left_out[name] = "its name"
        elif target and not _stays(name, target):
            left_out[name] = "a link that leads out"
        elif target:
            yield _Entry(name, 0, target=target)
        elif stat.S_ISREG(about.st_mode):
            yield _Entry(name, about.st_size, bool(about.st_mode & stat.S_IXUSR))
        else:
            left_out[name] = "no regular file"


def _is_plain(name: str) -> bool:
    """Whether it is a relative path as any file system takes it, and a terminal shows it."""
    parts = name.split("/")
    return (
        name.isprintable()  # surrogates, of what is no UTF-8, are not
        and len(name.encode()) <= _MOST_NAME
        and all(part not in ("", ".", "..") for part in parts)
        and all(len(part.encode()) <= _MOST_PART for part in parts)
    )


def _stays(name: str, target: str) -> bool:
    """Whether a link leads to a place in the folder that it lies in, through whatever other such
    links: it goes up first, no higher than the folder, then only down."""
    parts = target.split("/")
    up = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    rest = "/".join(parts[up:])
    return up <= name.count("/") and (_is_plain(rest) if rest else up > 0)


def _holds(root: Path, entries: Sequence[_Entry]) -> None:
    """Raises UsageError where it is too much to travel."""
    whole = sum(one.size for one in entries)
    if whole > MOST_UNPACKED:
        raise _too_much(root, entries, f"{size(whole)}, at most {size(MOST_UNPACKED)} may")
    folders: Counter[str] = Counter()
    for one in entries:
        folders[os.path.dirname(one.name) or "."] += 1  # noqa: PTH120 # of text
    if max(len(entries), len(folders)) > MOST_FILES:
        listed = ", ".join(f"{name} ({count:,})" for name, count in folders.most_common(_NAMED))
        raise UsageError(
            f"{root}: {len(entries):,} files, at most {MOST_FILES:,} may travel; most are in "
            f"{listed}; leave out in {IGNORE} what no run needs"
        )


def _too_much(root: Path, entries: Iterable[_Entry], what: str) -> UsageError:
    largest = sorted(entries, key=lambda one: -one.size)[:_NAMED]
    listed = ", ".join(f"{one.name} ({size(one.size)})" for one in largest)
    return UsageError(
        f"{root}: {what} travel; the largest files are {listed}; leave out in {IGNORE} what no run "
        "needs"
    )


def _archived(tree: _Tree, entries: Sequence[_Entry]) -> bytes:
    """The archive: owners, times and order are the same for every one who packs this tree."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=buffer, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for one in entries:
            if one.target:
                link = tarfile.TarInfo(one.name)
                link.type, link.linkname = tarfile.SYMTYPE, one.target
                archive.addfile(link)
            else:
                _add(archive, one.name, (tree.root / one.name).read_bytes(), one.executable)
            if buffer.tell() > MOST_PACKED:
                break
    if buffer.tell() > MOST_PACKED:
        raise _too_much(tree.root, entries, f"packed, no more than {size(MOST_PACKED)} may")
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes, executable: bool = False) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o755 if executable else 0o644
    archive.addfile(member, io.BytesIO(data))


def unpack(archive: bytes, folder: Path) -> None:
    """Lay out an archive, by whomever, in a folder that is new or empty.

    Nothing is written outside it, through no link; files have neither owners nor more rights than
    to be run; the limits hold while it is read.

    Raises:
        UsageError: it is no archive as `pack` makes them. What came before that in it is there.
        StoreError: the folder cannot be written, or is not empty.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise StoreError(f"{folder}: is not empty")
        _laid_out(archive, folder)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as exc:
        raise _refused(f"is damaged ({exc})") from exc
    except (ValueError, OverflowError, RecursionError) as exc:  # tarfile, of hostile headers
        raise _refused(f"has a header that cannot be read ({exc})") from exc
    except OSError as exc:
        raise StoreError(f"{folder}: cannot be written ({exc.strerror})") from exc


def _refused(why: str) -> UsageError:
    return UsageError(f"archive of code: {printable(why)}; pack it with advisor submit")


def _laid_out(archive: bytes, folder: Path) -> None:
    laid = _Laid()
    links: list[tarfile.TarInfo] = []
    with (
        _Forward(archive) as unzipped,
        tarfile.open(fileobj=unzipped, mode="r:", encoding="utf-8", errors="strict") as members,
    ):
        for member in members:
            laid.take(member)
            path = folder / member.name
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.issym():
                links.append(member)
            else:
                _write(path, member, members)
    for link in links:  # at last: nothing is written through one
        (folder / link.name).symlink_to(link.linkname)


def _write(path: Path, member: tarfile.TarInfo, members: tarfile.TarFile) -> None:
    source = members.extractfile(member)
    assert source is not None
    mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        left = member.size
        while left:
            data = source.read(min(left, _MOST_READ // 2))
            if not data:
                raise _refused(f"ends in the middle of {member.name}")
            file.write(data)
            left -= len(data)


class _Laid:
    """What was laid out so far."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._files = self._size = 0

    def take(self, member: tarfile.TarInfo) -> None:
        """Raises UsageError where a member may not be laid out."""
        name = member.name
        if not _is_plain(name):
            raise _refused(f"names a file {name[:80]!r}")
        if member.size < 0 or member.issparse() or member.type not in _KINDS:
            raise _refused(f"{name}: is no plain file, folder or link")
        if member.issym() and not _stays(name, member.linkname):
            raise _refused(f"{name}: is a link out of the folder")
        above = [str(one) for one in PurePosixPath(name).parents][:-1]
        if any(self._kinds.setdefault(one, _FOLDER) != _FOLDER for one in above):
            raise _refused(f"{name}: lies in what is no folder")
        kind = _KINDS[member.type]
        if name in self._kinds and not self._kinds[name] == kind == _FOLDER:
            raise _refused(f"{name}: is there twice")
        self._kinds[name] = kind
        self._size += member.size
        self._files += kind != _FOLDER
        if self._size > MOST_UNPACKED:
            raise _refused(f"holds more than {size(MOST_UNPACKED)}")
        if max(self._files, len(self._kinds) - self._files) > MOST_FILES:
            raise _refused(f"holds more than {MOST_FILES:,} files")


_FOLDER = "folder"
_KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.DIRTYPE: _FOLDER,
    tarfile.SYMTYPE: "link",
}


class _Forward(gzip.GzipFile):
    """A gzip in memory, read within limits: forward alone, and never much at once."""

    def __init__(self, data: bytes) -> None:
        super().__init__(fileobj=io.BytesIO(data), mode="rb")

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MOST_READ:
            raise _refused("has a header that is too large")
        self._within(self.tell() + size)
        return super().read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET:  # else tell() asks where it is
            if offset < self.tell():
                raise _refused("has a header that leads back")
            self._within(offset)
        return super().seek(offset, whence)

    @staticmethod
    def _within(offset: int) -> None:
        if offset > MOST_UNPACKED + _HEADERS * MOST_FILES:
            raise _refused(f"holds more than {size(MOST_UNPACKED)}")
