"""Hostile records and stores: what somebody plants, or what a disk does, one case a line.

    for case in CASES:
        url = case.make(folder)          # a store with one honest record and the hostile thing
        ... advisor show --cache URL ...

The honest record, `examples.record()`, is by nobody known and of a device that is not here. After
whatever was done with the store it can still be read where `case.honest` says so, no file called
`ran` lies in `folder`, and nothing took longer than a few seconds. Nothing in a store is followed,
opened, imported or run, and no text of it comes out raw.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import shutil
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgpack

from advisor.cache.codec import encode, make_envelope
from advisor.cache.name import Name
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.cache.stores.disk import write_pack
from tests.cache.examples import KEY, MINE, changed, planted, record

OTHER = record(key=changed(KEY, "mode", "infer"))
"""What the hostile record would be, were it honest: one that nothing else is in the place of."""


@dataclass(frozen=True, slots=True)
class Case:
    """`make` builds a store below a folder and returns its URL. `honest`: the honest record is
    there and can be read; `refused`: the text that says why the hostile one may not be used, or ''
    where it does not count as a record at all."""

    name: str
    make: Callable[[Path], str]
    honest: bool = True
    refused: str = ""


def _honest(url: str) -> str:
    Records(open_store(url)).put(record())
    return url


def _put(url: str, data: bytes, like: Record = OTHER) -> str:
    open_store(url).put(Name.of(like, data).text, data)
    return url


def _planted(path: str, value: object) -> Callable[[Path], str]:
    """A record with one value in it that no encoder wrote."""

    def make(folder: Path) -> str:
        url = _honest(f"dir:{folder}/store")
        data = make_envelope(msgpack.packb(planted(OTHER, path, value)))
        # Under the name that it would have, as far as one can be made from what is planted.
        return _put(url, data)

    return make


def _bytes(data: bytes) -> Callable[[Path], str]:
    return lambda folder: _put(_honest(f"dir:{folder}/store"), data)


def _file(make: Callable[[Path, Path], None]) -> Callable[[Path], str]:
    """Something else in the place of a record's file."""

    def made(folder: Path) -> str:
        url = _honest(f"dir:{folder}/store")
        _put(url, b"x")
        (path,) = (one for one in (folder / "store").iterdir() if one.read_bytes() == b"x")
        path.unlink()
        make(folder, path)
        return url

    return made


def _sparse(_folder: Path, path: Path) -> None:
    for number in range(60):
        other = path.with_name(path.name.replace(".msgpack", f"{number:04}.msgpack"))
        name = Name.of(OTHER, str(number).encode()).text.replace("/", "-")
        with other.with_name(f"{name}.msgpack").open("wb") as file:
            file.truncate(10 * 2**30)


def _many(_folder: Path, path: Path) -> None:
    for number in range(2_000):
        (path.parent / f"record-{number:012x}.msgpack").touch()


def _link(folder: Path, path: Path) -> None:
    path.symlink_to("/dev/zero" if os.path.exists("/dev/zero") else folder)  # noqa: PTH110


def _sql(*statements: str) -> Callable[[Path], str]:
    """A database in which somebody was, with an honest record in it."""

    def make(folder: Path) -> str:
        url = _honest(f"disk:{folder}/store")
        _put(url, b"\x00")
        connection = sqlite3.connect(folder / "store" / "records" / "cache.db")
        with connection:
            for statement in statements:
                mark = Bomb(folder / "ran")
                values = {"bomb": pickle.dumps(mark)} if ":bomb" in statement else {}
                connection.execute(statement, values)
        connection.close()
        return url

    return make


class Bomb:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self.mark), 0o700)


def _lying_name(folder: Path) -> str:
    url = _honest(f"dir:{folder}/store")
    data = encode(record())
    made = dataclasses.replace(record().provenance, created=time.time() - 60, effort="exhaustive")
    return _put(url, data, dataclasses.replace(record(), provenance=made))


def _earlier(folder: Path) -> str:
    """A stranger's of the same key, newer and of more effort, in a store before one's own."""
    first, second = f"dir:{folder}/first", f"dir:{folder}/store"
    Records(open_store(second), keyring=MINE).put(record())
    theirs = record(created=1.74e9)
    made = dataclasses.replace(theirs.provenance, effort="exhaustive")
    theirs = dataclasses.replace(theirs, provenance=made)
    _put(first, encode(theirs), theirs)
    return f"{first},{second}"


def _pack(data: bytes) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / "records.pack").write_bytes(data)
        return f"pack:{folder}/records.pack"

    return make


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "records.pack")
    return f"pack:{folder}/records.pack"


def _huge_pack(folder: Path) -> str:
    path, data = folder / "records.pack", encode(record())
    bomb = Name.of(OTHER, b"").text
    write_pack(path, [[(Name.of(record(), data).text, data), (bomb, b"1"), ("../../ran", b"1")]])
    with contextlib.closing(sqlite3.connect(path)) as pack, pack:
        pack.execute("UPDATE Cache SET value = zeroblob(100000000) WHERE key = ?", (bomb,))
    return f"pack:{path}"


def _studies(folder: Path) -> str:
    url = _honest(f"disk:{folder}/store")
    outside = folder / "outside"
    outside.mkdir()
    (folder / "store" / "studies").symlink_to(outside)
    return url


def _exclusive(folder: Path) -> str:
    """Locked by a transaction that never ends, in a process that is gone with the test's."""
    url = _honest(f"disk:{folder}/store")
    database = folder / "store" / "records" / "cache.db"
    connection = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("BEGIN EXCLUSIVE")
    HELD.append(connection)
    return url


def _damaged(spoil: Callable[[Path], object]) -> Callable[[Path], str]:
    """A database that is none, or half of one."""

    def make(folder: Path) -> str:
        url = _honest(f"disk:{folder}/store")
        spoil(folder / "store" / "records" / "cache.db")
        return url

    return make


def _file_for_folder(database: Path) -> None:
    shutil.rmtree(database.parent)
    database.parent.touch()


HELD: list[sqlite3.Connection] = []
"""Connections that hold a lock; close them when the case is done."""

_ENDLESS = (
    "ALTER TABLE Cache RENAME TO Real",
    "CREATE VIEW Cache AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    "SELECT i AS rowid, 'record/' || i AS key, 1 AS raw, 1 AS mode, x'00' AS value FROM n",
)
_SET = "UPDATE Cache SET value ="
_BOMB_AS_KEY = "INSERT INTO Cache (key, raw, mode, value) VALUES (:bomb, 0, 1, x'00')"
_NO_UTF8 = tuple(
    f"INSERT INTO Cache (key, raw, mode, value) VALUES ({key}, 1, 1, cast(x'fffe' as text))"
    for key in ("'record/a'", "cast(x'ff' as text)")
)
_TRIGGER = "CREATE TRIGGER gone AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END"
_HUGE = f"{_SET} zeroblob(100000000) WHERE value = x'00'"
_COMPUTED = "ALTER TABLE Cache ADD COLUMN more AS (hex(zeroblob(1000000)))"
CHANGED = msgpack.packb({"format": 3, "record": b"\x80", "sha256": b"\0" * 32})
CASES = (
    Case("made in the year 4253", _planted("provenance.created", 7.2e10), refused="a time from"),
    Case("colours in a name", _planted("target.name", "a\x1b[31mb.py"), refused="one line"),
    Case("markup in a name", _planted("target.name", "[/bold][red]a.py"), refused="name"),
    Case("a target that runs", _planted("target.name", "subprocess:getoutput"), refused="name"),
    Case("a task that runs", _planted("key.task.target", "subprocess:getoutput; touch ran")),
    Case("rubbish", _bytes(os.urandom(500)), refused="not msgpack"),
    Case("lists in lists", _bytes(b"\xdd\x00\x00\x07\xff" * 1000), refused="not msgpack"),
    Case("an older format", _bytes(msgpack.packb({"format": 1, "record": {}}))),
    Case("a newer format", _bytes(msgpack.packb({"format": 99})), refused="upgrade advisor"),
    Case("changed since", _bytes(CHANGED), refused="checksum"),
    Case("a pickle", _bytes(pickle.dumps(Bomb(Path("ran")))), refused="not msgpack"),
    Case("another's name", _lying_name, refused="does not match its name"),
    Case("unsigned, in a store before", _earlier),
    Case("a pipe", _file(lambda _f, path: os.mkfifo(path)), refused="regular"),
    Case("a folder", _file(lambda _f, path: path.mkdir()), refused="regular"),
    Case("a device", _file(_link), refused="regular"),
    Case("60 files of 10 GiB", _file(_sparse), refused="larger than"),
    Case("2,000 files", _file(_many)),
    Case("a pickle in the database", _sql(f"{_SET} :bomb, mode = 4"), honest=False),
    Case("a pickle as a key", _sql(_BOMB_AS_KEY)),
    Case("an endless view", _sql(*_ENDLESS), honest=False),
    Case("a trigger", _sql(_TRIGGER), honest=False),
    Case("a computed column", _sql(_COMPUTED), honest=False),
    Case("a huge value", _sql(_HUGE), refused="larger than"),
    Case("a text for a value", _sql(f"{_SET} 'text'"), honest=False),
    Case("texts that are not UTF-8", _sql(*_NO_UTF8)),
    Case("an exclusive lock", _exclusive, honest=False),
    Case("studies elsewhere", _studies),
    Case("no database", _damaged(lambda file: file.write_bytes(b"none" * 1000)), honest=False),
    Case("half a database", _damaged(lambda file: os.truncate(file, 8192)), honest=False),
    Case("a file for a folder", _damaged(_file_for_folder), honest=False),
    Case("no pack", _pack(b"This is no pack. " * 100), honest=False),
    Case("an empty pack", _pack(b""), honest=False),
    Case("a pipe for a pack", _pipe, honest=False),
    Case("a huge value in a pack", _huge_pack, refused="larger than"),
)
