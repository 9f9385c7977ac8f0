"""Code archives: a folder is packed where a job is submitted, and unpacked where the job runs.

An archive is a tar.gz of regular files and of links that stay inside the folder. The same tree
gives the same bytes, whatever its commit. From a git checkout, `pack` takes the current state of
the files that git tracks or does not ignore; from any other folder, all files except DEFAULTS.
.advisorignore, in the syntax of .gitignore, excludes further files.
"""

from __future__ import annotations

import functools
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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from advisor.cache.shown import size
from advisor.cache.stores.timeout import check_deadline
from advisor.errors import UsageError, printable

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

NEEDS_CODE = 428  # the HTTP status of a server that does not have a job's archive yet
MAX_PACKED = 32 * 2**20
MAX_UNPACKED = 256 * 2**20
MAX_FILES = 20_000
IGNORE = ".advisorignore"
DEFAULTS = """
.git/ .hg/ .svn/ .venv/ venv/ .tox/ .nox/ node_modules/ site-packages/
__pycache__/ *.py[co] *.egg-info/ .mypy_cache/ .pytest_cache/ .ruff_cache/ .ipynb_checkpoints/
.cache/ .idea/ .vscode/ .DS_Store wandb/ mlruns/ lightning_logs/
.env .env.* .netrc *.pem *.key id_rsa id_ed25519
"""
"""Untracked files that are never code, or are secrets."""
DATA = "*.pt *.pth *.ckpt *.safetensors *.bin *.onnx *.npy *.npz *.h5 *.parquet *.tar *.zip"
LARGE = 2**20  # untracked files of DATA with more bytes than this are left out
_LISTED = 5  # names in a message, at most
_HEADERS = 4096  # bytes of headers and padding that a file may have in an archive, on average
_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeArchive:
    """A packed folder.

    Attributes:
        archive: the tar.gz.
        digest: its SHA-256, as hex.
        root: the folder that was packed; in a git checkout, its top folder.
        size: bytes of the files, unpacked.
        commit: the checkout's commit, or ''; `dirty`: whether the files differ from that commit.
        left_out: files that were not packed, each as 'name: reason'.
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
    """The names of files below `root`. `untracked` is None outside git."""

    root: Path
    tracked: Collection[str] = ()
    untracked: Collection[str] | None = None
    commit: str = ""
    dirty: bool = False


def pack(folder: Path) -> CodeArchive:
    """Pack the code that a command in this folder needs. Raises UsageError if the code is too large
    or cannot be read, or `folder` is the home folder."""
    left_out: dict[str, str] = {}
    folder = folder.resolve()
    try:
        tree = _checkout(folder) or _Tree(folder)
        if tree.untracked is None and _is_home(folder):
            raise UsageError(f"{folder}: this is no project's folder; submit from one")
        found = itertools.islice(_members(tree, left_out), 4 * MAX_FILES)
        members = sorted(found, key=lambda one: one.name)
        sizes = Counter({one.name: one.size for one in members})
        if len(sizes) > MAX_FILES:
            folders = Counter(str(PurePosixPath(name).parent) for name in sizes)
            what = f"{len(sizes):,} files, at most {MAX_FILES:,}"
            raise _too_much(tree.root, what, folders, "{:,} files".format)
        if sizes.total() > MAX_UNPACKED:
            what = f"{size(sizes.total())}, at most {size(MAX_UNPACKED)}"
            raise _too_much(tree.root, what, sizes, size)
        archive = _archived(tree.root, members)
    except OSError as exc:
        raise UsageError(f"{exc.filename or folder}: cannot be read ({exc.strerror})") from exc
    if len(archive) > MAX_PACKED:
        raise _too_much(tree.root, f"packed, at most {size(MAX_PACKED)}", sizes, size)
    return CodeArchive(
        archive=archive,
        digest=hashlib.sha256(archive).hexdigest(),
        root=tree.root,
        files=len(members),
        size=sizes.total(),
        commit=tree.commit,
        dirty=tree.dirty,
        left_out=tuple(printable(f"{name}: {why}") for name, why in sorted(left_out.items())),
    )


def _too_much(
    root: Path, what: str, amounts: Counter[str], shown: Callable[[int], str]
) -> UsageError:
    most = ", ".join(f"{name} ({shown(count)})" for name, count in amounts.most_common(_LISTED))
    return UsageError(
        f"{root}: {what} can be sent; the largest: {most}; list unneeded files in {IGNORE}"
    )


def _is_home(folder: Path) -> bool:
    """Whether the folder is the user's home or above it."""
    try:
        return Path.home().resolve().is_relative_to(folder)
    except RuntimeError:  # the user has no home
        return False


def _checkout(folder: Path) -> _Tree | None:
    """The git checkout around a folder; None if there is none, or if it holds the whole home.
    Raises UsageError if git fails to list the files."""
    root = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), None)
    if root is None or _is_home(root):
        return None
    fails = f"{folder}: advisor needs git to find ignored files, but git fails"
    found = git(fails, "-C", str(root), "status", "--porcelain=v2", "--branch", "-z", "-uall")
    status = list(filter(None, found.split("\0")))
    tracked = git(fails, "-C", str(root), "ls-files", "-z", "-c", "--recurse-submodules")
    commit = next(line for line in status if line.startswith("# branch.oid "))[13:]
    return _Tree(
        root=root,
        tracked=list(filter(None, tracked.split("\0"))),
        untracked=[line.removeprefix("? ") for line in status if line.startswith("? ")],
        commit="" if commit == "(initial)" else commit,
        dirty=any(not line.startswith("# ") for line in status),
    )


def git(what: str, *words: str) -> str:
    """The output of a git command. Raises UsageError with git's reason, after `what`."""
    own = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    how: dict[str, Any] = {"env": own, "stdin": subprocess.DEVNULL, "capture_output": True}
    try:
        done = subprocess.run(["git", *words], check=True, **how)
    except (OSError, subprocess.CalledProcessError) as exc:
        said = os.fsdecode(getattr(exc, "stderr", b"")) or "git is not installed"
        raise UsageError(f"{what} ({printable(' '.join(said.split()))})") from exc
    return os.fsdecode(done.stdout).removesuffix("\n")


def _walk(root: Path, ignored: GitIgnoreSpec, left_out: dict[str, str]) -> Iterator[str]:
    """Yields the files below a folder outside git, except those in ignored folders."""
    places = [""]
    while places:
        below = places.pop()
        for entry in os.scandir(root / below):
            check_deadline()
            name = below + entry.name
            if not entry.is_dir(follow_symlinks=False):
                yield name
            elif ignored.match_file(f"{name}/"):
                left_out[f"{name}/"] = "ignored"
            else:
                places.append(f"{name}/")


def _members(tree: _Tree, left_out: dict[str, str]) -> Iterator[tarfile.TarInfo]:
    """Yields the members to pack; adds the names of other files to `left_out`. Raises UsageError
    if .advisorignore has an invalid pattern."""
    from pathspec import GitIgnoreSpec

    file = tree.root / IGNORE
    try:
        own = file.read_text().splitlines() if file.exists() else []
        of_tracked, of_others, data = map(
            GitIgnoreSpec.from_lines, (own, [*DEFAULTS.split(), *own], DATA.split())
        )
    except ValueError as exc:
        raise UsageError(f"{file}: not a list of patterns ({exc})") from exc
    known = set(tree.tracked)
    others = _walk(tree.root, of_others, left_out) if tree.untracked is None else tree.untracked
    real = functools.cache(lambda folder: os.path.realpath(folder) == folder)
    for name in itertools.chain(sorted(known), others):
        try:
            member = _member(name, tree.root / name)
        except (FileNotFoundError, NotADirectoryError):  # tracked, and deleted since
            continue
        if not real(str((tree.root / name).parent)):  # a link replaced a tracked folder
            continue
        if (of_tracked if name in known else of_others).match_file(name):
            left_out[name] = "ignored"
        elif member is None:
            left_out[name] = "no regular file"
        elif name not in known and member.size > LARGE and data.match_file(name):
            left_out[name] = f"{size(member.size)} of data"
        elif not _is_portable(name):
            left_out[name] = "not a portable name"
        elif member.issym() and not _stays_inside(name, member.linkname):
            left_out[name] = "a link that leads out"
        else:
            yield member


def _member(name: str, path: Path) -> tarfile.TarInfo | None:
    """The tar header of a file or link, without owner and time; None for anything else."""
    member, about = tarfile.TarInfo(name), path.lstat()
    if stat.S_ISLNK(about.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
    elif stat.S_ISREG(about.st_mode):
        member.size = about.st_size
        member.mode = 0o755 if about.st_mode & stat.S_IXUSR else 0o644
    else:
        return None
    return member


def _is_portable(name: str) -> bool:
    """Whether any file system takes the relative path, and a terminal shows it."""
    parts = name.split("/")
    return (
        name.isprintable()  # False for invalid UTF-8 (surrogates)
        and len(name.encode()) <= 1024
        and all(part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts)
    )


def _stays_inside(name: str, target: str) -> bool:
    """Whether a link stays inside the folder, even through other links that do. The link's path
    must first go up, no higher than the folder, then only down."""
    parts = target.split("/")
    up = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    rest = "/".join(parts[up:])
    return up <= name.count("/") and (_is_portable(rest) if rest else up > 0)


def _archived(root: Path, members: Sequence[tarfile.TarInfo]) -> bytes:
    """The archive; if it would be too large, only its beginning."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=buffer, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member in members:
            data = b"" if member.issym() else (root / member.name).read_bytes()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
            if buffer.tell() > MAX_PACKED:
                break
    return buffer.getvalue()


def unpack(archive: bytes, folder: Path) -> None:
    """Unpack an archive from an untrusted sender into a new folder.

    Nothing is written before all members are checked, outside the folder, or through a link. Of a
    file's owner and rights, only the right to be executed is kept. Empty folders are left out.

    Raises:
        UsageError: the archive is too large, or not as `pack` makes them.
        OSError: the folder exists, or cannot be written.
    """
    folder.mkdir(parents=True)
    try:
        with gzip.open(io.BytesIO(archive)) as zipped:
            data = io.BytesIO(zipped.read(MAX_UNPACKED + _HEADERS * MAX_FILES))
        with tarfile.open(fileobj=data, mode="r:", encoding="utf-8", errors="strict") as tar:
            # Links come last.
            for member in sorted(_checked(tar), key=tarfile.TarInfo.issym):
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member) if member.isreg() else None
                if source is None:
                    path.symlink_to(member.linkname)
                    continue
                path.write_bytes(source.read())
                if member.mode & stat.S_IXUSR:
                    path.chmod(0o755)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as exc:
        raise _refused(f"is damaged ({exc})") from exc
    except (ValueError, OverflowError, RecursionError) as exc:  # tarfile, of hostile headers
        raise _refused(f"has a header that cannot be read ({exc})") from exc


def _refused(why: str) -> UsageError:
    return UsageError(f"code archive: {printable(why)}; pack it with advisor submit")


def _checked(tar: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """The files and links of an archive. Raises UsageError if a member is not allowed."""
    found: list[tarfile.TarInfo] = []
    folders: set[str] = set()
    total = 0
    for member in tar:
        name = member.name
        if not _is_portable(name):
            raise _refused(f"has a file with the name {name[:80]!r}")
        if member.type not in _TYPES or member.issparse() or member.size < 0:
            raise _refused(f"has {name}, which is no plain file, folder or link")
        if member.issym() and not _stays_inside(name, member.linkname):
            raise _refused(f"has {name}, a link out of the folder")
        folders.update(map(str, PurePosixPath(name).parents))
        if member.isdir():
            folders.add(name)
        else:
            found.append(member)
        total += member.size
        if total > MAX_UNPACKED:
            raise _refused(f"holds more than {size(MAX_UNPACKED)}")
        if max(len(found), len(folders)) > MAX_FILES:
            raise _refused(f"holds more than {MAX_FILES:,} files or folders")
    for name, count in Counter(one.name for one in found).items():
        if count > 1 or name in folders:
            raise _refused(f"has {name} twice, or as a folder and as something else")
    return found
