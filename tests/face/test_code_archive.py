"""Code archives: packing is reproducible, and unpacking is safe."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.errors import UsageError
from advisor.jobs import code_archive
from advisor.jobs.code_archive import pack, unpack


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "nets").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)\n")
    (folder / "nets" / "net.py").write_text("x = 1\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "latest").symlink_to("nets/net.py")
    return folder


PACKED = ["latest", "nets/net.py", "run.sh", "train.py"]


def git(folder: Path, *words: str) -> str:
    known = {"HOME": str(folder.parent), "PATH": os.environ["PATH"]}
    who = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
    done = subprocess.run(
        ["git", "-C", folder, *who, *words], env=known, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit_all(folder: Path) -> str:
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "all")
    return git(folder, "rev-parse", "HEAD")


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getnames()


def test_unpacking_restores_the_packed_files(project: Path, tmp_path: Path) -> None:
    packed = pack(project)
    assert names(packed.archive) == PACKED and packed.files == 4 and not packed.left_out
    unpack(packed.archive, tmp_path / "there")
    for name in PACKED:
        assert (tmp_path / "there" / name).read_text() == (project / name).read_text()
    assert os.access(tmp_path / "there" / "run.sh", os.X_OK)
    assert not os.access(tmp_path / "there" / "train.py", os.X_OK)
    assert (tmp_path / "there" / "latest").is_symlink()
    with pytest.raises(FileExistsError):
        unpack(packed.archive, tmp_path / "there")
    unpack(archive_of(member("a", mode=0o7777, uid=0)), tmp_path / "here")
    assert stat.S_IMODE((tmp_path / "here" / "a").stat().st_mode) & 0o7022 == 0


def test_equal_trees_give_equal_archives(project: Path, tmp_path: Path) -> None:
    first = pack(project)
    other = tmp_path / "elsewhere" / "other"
    shutil.copytree(project, other, symlinks=True, copy_function=shutil.copyfile)
    (other / "run.sh").chmod(0o700)
    os.utime(other / "train.py", (1, 1))
    assert pack(other).archive == first.archive
    (other / "train.py").write_text("print(2)\n")
    assert pack(other).digest != first.digest


def test_a_checkout_is_packed_with_its_uncommitted_changes(project: Path, tmp_path: Path) -> None:
    (project / ".gitignore").write_text("out/\n")
    git(project, "init", "-q")
    fresh = pack(project)
    assert (names(fresh.archive), fresh.commit) == ([".gitignore", *PACKED], "")
    commit = commit_all(project)
    clean = pack(project)
    assert (clean.commit, clean.dirty) == (commit, False)
    git(project, "commit", "-q", "--allow-empty", "-m", "nothing")
    later = pack(project)
    assert later.commit != commit and later.digest == clean.digest
    (project / "out").mkdir()
    (project / "out" / "log").write_text("ignored")
    assert pack(project).digest == clean.digest
    (project / "new.py").write_text("untracked")
    (project / "train.py").write_text("changed")
    (project / "run.sh").unlink()
    changed = pack(project / "nets")  # a subfolder packs the whole checkout
    assert names(changed.archive) == [".gitignore", "latest", "nets/net.py", "new.py", "train.py"]
    assert (changed.root, changed.commit, changed.dirty) == (project, later.commit, True)
    library = tmp_path / "library"
    library.mkdir()
    (library / "lib.py").write_text("x = 1")
    commit_all(library)
    git(project, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(library), "lib")
    assert "lib/lib.py" in names(pack(project).archive)
    # A link that replaces a tracked folder is not followed.
    shutil.move(project / "nets", tmp_path / "outside")
    (project / "nets").symlink_to(tmp_path / "outside")
    assert "nets/net.py" not in names(pack(project).archive)


def test_nothing_is_packed_if_git_cannot_list_the_files(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / ".gitignore").write_text("secrets.yaml\n")
    (project / "secrets.yaml").write_text("key: 1")
    commit_all(project)
    with monkeypatch.context() as without, pytest.raises(UsageError, match="not installed"):
        without.setenv("PATH", str(project))
        pack(project / "nets")
    (project / ".git" / "HEAD").write_text("damaged")
    with pytest.raises(UsageError, match=r"fails \(fatal: "):
        pack(project)


@pytest.mark.parametrize("in_git", [False, True])
def test_ignored_large_and_unsafe_files_are_left_out(
    project: Path, monkeypatch: pytest.MonkeyPatch, in_git: bool
) -> None:
    monkeypatch.setattr(code_archive, "LARGE", 100)
    if in_git:
        (project / "tracked.pt").write_bytes(bytes(200))
        (project / "secret.key").write_text("tracked, so meant")
        commit_all(project)
    (project / "node_modules").mkdir()
    (project / "node_modules" / "a.js").write_text("")
    (project / "__pycache__").mkdir()
    (project / "__pycache__" / "a.pyc").write_text("")
    (project / ".env").write_text("KEY=1")
    (project / "small.pt").write_bytes(bytes(50))
    (project / "large.pt").write_bytes(bytes(200))
    (project / "data").mkdir()
    (project / "data" / "raw").write_text("")
    (project / "data" / "keep").write_text("")
    (project / ".advisorignore").write_text("# mine\n/data/*\n!keep\nrun.sh\n")
    (project / "up").symlink_to("../outside")
    (project / "absolute").symlink_to("/etc/passwd")
    os.mkfifo(project / "pipe")
    (project / "odd\nname").write_text("")
    packed = pack(project)
    extra = ["secret.key", "tracked.pt"] if in_git else []
    kept = [".advisorignore", "data/keep", "latest", "nets/net.py", *extra, "small.pt", "train.py"]
    assert names(packed.archive) == sorted(kept)
    why = dict(line.rsplit(": ", 1) for line in packed.left_out)
    assert why["large.pt"] == "200 B of data"
    assert why["up"] == why["absolute"] == "a link that leads out"
    assert why["odd?name"] == "not a portable name" and why["run.sh"] == why[".env"] == "ignored"
    assert in_git or why["pipe"] == "no regular file"  # git does not list it


def test_too_much_code_is_refused_naming_the_largest_files(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "big.txt").write_bytes(os.urandom(3000))
    monkeypatch.setattr(code_archive, "MAX_PACKED", 2000)
    with pytest.raises(UsageError, match=r"packed.* 1.95 KiB.* big.txt \(2.93 KiB\)"):
        pack(project)
    monkeypatch.setattr(code_archive, "MAX_UNPACKED", 2999)
    with pytest.raises(UsageError, match=r"at most 2.93 KiB.* big.txt .*\.advisorignore"):
        pack(project)
    monkeypatch.setattr(code_archive, "MAX_UNPACKED", 1e9)
    monkeypatch.setattr(code_archive, "MAX_FILES", 4)
    with pytest.raises(UsageError, match=r"5 files, at most 4 .* \. \(4 files\), nets \(1 files\)"):
        pack(project)


def test_a_home_folder_is_not_packed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project))
    for folder in (project, project.parent, Path("/")):
        with pytest.raises(UsageError, match="no project's folder"):
            pack(folder)
    git(project, "init", "-q")  # a repository in the home folder does not count
    packed = pack(project / "nets")
    assert (packed.root, names(packed.archive)) == (project / "nets", ["net.py"])


def test_unreadable_folders_and_ignore_files_are_refused(project: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        pack(project / "none")
    (project / ".advisorignore").write_bytes(b"\xff\xfe\0")
    with pytest.raises(UsageError, match="not a list of patterns"):
        pack(project)


DEVICES = ("CHR", "BLK", "FIFO")
Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, data: bytes = b"", **more: object) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in more.items():
        setattr(info, field, value)
    return info, data


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Member:
    return member(name, type=kind, linkname=target)


def archive_of(*members: Member, **how: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", **how) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


NAME, OUT, TWICE, KIND = "with the name", "out of the folder", "twice, or", "no plain file"


def test_hostile_members_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[list[Member], str]] = [
        *(
            ([member(name)], NAME)
            for name in (
                *("/etc/passwd", "../outside", "a/../../outside", "a//b", "./a"),
                *("a\x1b[2J", "a\nb", "a\u202eb", "a" * 256, "/".join(["a"] * 600)),
            )
        ),
        *(
            ([link(*pair)], OUT)
            for pair in (
                *(("a", "/etc/passwd"), ("a", ".."), ("a/b", "../../outside"), ("a", "")),
                ("a/b", "c/../../../outside"),
            )
        ),
        ([link("a", "b"), member("a/c", b"x")], TWICE),
        ([member("a"), member("a/c")], TWICE),
        ([member("a/c"), link("a", "b")], TWICE),
        ([member("a"), member("a")], TWICE),
        ([member("a", type=tarfile.DIRTYPE), link("a", "b")], TWICE),
        ([link("a", "train.py", tarfile.LNKTYPE)], KIND),
        *(([member("a", type=getattr(tarfile, f"{kind}TYPE"))], KIND) for kind in DEVICES),
        ([member("a", type=b"S")], f"{KIND}|cannot be read|damaged"),
    ]
    for members, reason in cases:
        with pytest.raises(UsageError, match=reason):
            unpack(archive_of(member("first"), *members), tmp_path / "here")
        (tmp_path / "here").rmdir()  # raises if a file was written
    assert list(tmp_path.iterdir()) == []


def header_of(size: int, kind: bytes) -> bytes:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, size
    return gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(2**21), compresslevel=1)


# A chain of headers, each of which describes the next one.
CHAINED = gzip.compress(member("x", type=tarfile.XHDTYPE)[0].tobuf(tarfile.USTAR_FORMAT) * 2000)


def test_archive_bombs_are_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_archive, "MAX_UNPACKED", 2**20)
    monkeypatch.setattr(code_archive, "MAX_FILES", 50)
    for data, reason in (
        (archive_of(member("zeros", bytes(2**20 + 1))), "more than 1 MiB"),
        (archive_of(*(member(str(n), bytes(2**18)) for n in range(5))), "more than 1 MiB"),
        (archive_of(*(member(str(n)) for n in range(60))), "more than 50 files"),
        (archive_of(*(member(f"{n}/a/b/c/d") for n in range(20))), "more than 50 files"),
        (header_of(2**40, tarfile.REGTYPE), "more than 1 MiB"),
        (header_of(2**40, tarfile.XHDTYPE), "code archive: "),
        (header_of(2**30, tarfile.GNUTYPE_LONGNAME), "code archive: "),
        (header_of(-(2**20), tarfile.REGTYPE), "code archive: "),
        (CHAINED, "code archive: "),
        (archive_of(member("cut", bytes(5000)))[:60], "damaged"),
        (gzip.compress(tarfile.TarInfo("x").tobuf()[:300]), "damaged"),
        (b"", "damaged"),
        (b"PK\3\4", "damaged"),
    ):
        with pytest.raises(UsageError, match=reason):
            unpack(data, tmp_path / "here")
        (tmp_path / "here").rmdir()  # raises if a file was written


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_archive_is_refused_or_unpacked_inside(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    members = [member("a/b.py", b"x" * 700), link("c", "a/b.py"), member("ü" * 80, b"y")]
    tar = bytearray(gzip.decompress(archive_of(*members, format=tarfile.PAX_FORMAT)))
    for _ in range(data.draw(st.integers(1, 6))):
        tar[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):  # make the header checksums valid
        for at in range(0, len(tar) - 511, 512):
            block = tar[at : at + 512]
            if block[257:262] == b"ustar":
                total = sum(block) - sum(block[148:156]) + 8 * 32
                tar[at + 148 : at + 156] = b"%06o\0 " % total
    check_inside(tmp_path_factory.mktemp("any"), gzip.compress(bytes(tar), compresslevel=1))


NAMES = st.sampled_from(["a", "b", "a/a", "a/b", "b/a", "b/a/a"])
TARGETS = st.lists(st.sampled_from(["..", "a", "b", "."]), min_size=1, max_size=5).map("/".join)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(NAMES, TARGETS, max_size=5))
def test_no_chain_of_links_leads_out_of_the_folder(
    tmp_path_factory: pytest.TempPathFactory, links: dict[str, str]
) -> None:
    data = archive_of(*(link(*pair) for pair in links.items()))
    check_inside(tmp_path_factory.mktemp("links"), data)


def check_inside(folder: Path, data: bytes) -> None:
    """Check that an archive is refused with a message or unpacked inside its folder."""
    try:
        unpack(data, folder / "here")
    except UsageError as exc:
        assert str(exc).isprintable()
    assert list(folder.iterdir()) == [folder / "here"]
    for place, folders, files in os.walk(folder / "here"):
        for name in (*folders, *files):
            assert Path(os.path.realpath(Path(place, name))).is_relative_to(folder / "here")
