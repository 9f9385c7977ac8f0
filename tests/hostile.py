"""Hostile records and stores, planted by an attacker or damaged by a disk, one case per line.

    for case in CASES:
        url = case.make(folder)          # a store with one honest record and a hostile item
        ... advisor show --cache URL ...

The honest record, `examples.record()`, has no known signer and another device than this machine.
After any use of the store, that record is still readable if `case.honest`, `folder` has no file
called `ran`, and nothing took longer than a few seconds. advisor follows, opens, imports and runs
nothing that lies in a store, and prints no raw text of it.
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
"""The hostile record before it is spoiled. Its key differs from that of the honest record."""


@dataclass(frozen=True, slots=True)
class Case:
    """`spoil` plants something in a folder with an honest store, or returns another store's URL.
    `honest`: the honest record is still readable. `refused`: the reason why the hostile record is
    refused, or '' if it does not count as a record."""

    name: str
    spoil: Callable[[Path], object]
    kind: str = "dir"
    honest: bool = True
    refused: str = ""

    def make(self, folder: Path) -> str:
        url = f"{self.kind}:{folder}/store"
        Records(open_store(url)).put(record())
        made = self.spoil(folder)
        return made if isinstance(made, str) else url


def _put(folder: Path, data: bytes, like: Record = OTHER, store: str = "dir:store") -> None:
    kind, _, name = store.partition(":")
    open_store(f"{kind}:{folder}/{name}").put(Name.of(like, data).text, data)


def _bytes(data: bytes) -> Callable[[Path], object]:
    return lambda folder: _put(folder, data)


def _planted(path: str, value: object) -> Callable[[Path], object]:
    """Plants a record with one value that no encoder writes, under the name that belongs to its
    bytes."""
    return _bytes(make_envelope(msgpack.packb(planted(OTHER, path, value))))


def _file(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Replaces a record's file."""

    def made(folder: Path) -> None:
        _put(folder, b"x")
        (path,) = (one for one in (folder / "store").iterdir() if one.read_bytes() == b"x")
        path.unlink()
        make(path)

    return made


def _sparse(path: Path) -> None:
    for number in range(60):
        name = Name.of(OTHER, str(number).encode()).text.replace("/", "-")
        with path.with_name(f"{name}.msgpack").open("wb") as file:
            file.truncate(10 * 2**30)


def _many(path: Path) -> None:
    for number in range(2_000):
        (path.parent / f"record-{number:012x}.msgpack").touch()


def _link(path: Path) -> None:
    path.symlink_to("/dev/zero" if os.path.exists("/dev/zero") else path.parent.parent)  # noqa: PTH110


def _sql(*statements: str) -> Callable[[Path], object]:
    """Changes the database of an honest store with SQL."""

    def make(folder: Path) -> None:
        _put(folder, b"\x00", store="disk:store")
        values = {"bomb": pickle.dumps(Bomb(folder / "ran"))}
        with contextlib.closing(sqlite3.connect(_database(folder))) as connection, connection:
            for statement in statements:
                connection.execute(statement, values if ":bomb" in statement else {})

    return make


def _database(folder: Path) -> Path:
    return folder / "store" / "records" / "cache.db"


class Bomb:
    """A pickle that creates a folder when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self.mark), 0o700)


def _lying_name(folder: Path) -> None:
    made = dataclasses.replace(record().provenance, created=time.time() - 60, effort="exhaustive")
    _put(folder, encode(record()), dataclasses.replace(record(), provenance=made))


def _earlier(folder: Path) -> str:
    """Puts a stranger's newer record with the same key and more effort into an earlier store."""
    Records(open_store(f"dir:{folder}/own"), keyring=MINE).put(record())
    theirs = record(created=1.74e9, effort="exhaustive")
    _put(folder, encode(theirs), theirs, "dir:first")
    return f"dir:{folder}/first,dir:{folder}/own"


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


def _studies(folder: Path) -> None:
    (folder / "outside").mkdir()
    (folder / "store" / "studies").symlink_to(folder / "outside")


def _exclusive(folder: Path) -> None:
    """Locks the database in a transaction that lasts until its connection is closed."""
    database = _database(folder)
    connection = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("BEGIN EXCLUSIVE")
    HELD.append(connection)


def _file_for_folder(folder: Path) -> None:
    shutil.rmtree(_database(folder).parent)
    _database(folder).parent.touch()


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
    Case("a pipe", _file(os.mkfifo), refused="regular"),
    Case("a folder", _file(Path.mkdir), refused="regular"),
    Case("a device", _file(_link), refused="regular"),
    Case("60 files of 10 GiB", _file(_sparse), refused="larger than"),
    Case("2,000 files", _file(_many)),
    Case("a pickle in the database", _sql(f"{_SET} :bomb, mode = 4"), "disk", honest=False),
    Case("a pickle as a key", _sql(_BOMB_AS_KEY), "disk"),
    Case("an endless view", _sql(*_ENDLESS), "disk", honest=False),
    Case("a trigger", _sql(_TRIGGER), "disk", honest=False),
    Case("a computed column", _sql(_COMPUTED), "disk", honest=False),
    Case("a huge value", _sql(_HUGE), "disk", refused="larger than"),
    Case("a text for a value", _sql(f"{_SET} 'text'"), "disk", honest=False),
    Case("texts that are not UTF-8", _sql(*_NO_UTF8), "disk"),
    Case("an exclusive lock", _exclusive, "disk", honest=False),
    Case("studies elsewhere", _studies, "disk"),
    Case("no database", lambda at: _database(at).write_bytes(b"none" * 1000), "disk", honest=False),
    Case("half a database", lambda at: os.truncate(_database(at), 8192), "disk", honest=False),
    Case("a file for a folder", _file_for_folder, "disk", honest=False),
    Case("no pack", _pack(b"This is no pack. " * 100), honest=False),
    Case("an empty pack", _pack(b""), honest=False),
    Case("a pipe for a pack", _pipe, honest=False),
    Case("a huge value in a pack", _huge_pack, refused="larger than"),
)
