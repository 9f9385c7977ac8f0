"""Writers and readers of one store, killed at random instants: is anything lost, torn or wrong?

    python benchmarks/torture.py disk:/tmp/a dir:/tmp/b
    python benchmarks/torture.py 'redis://127.0.0.1:7000/0?timeout=5s' \\
        --server 'redis-server --port 7000 --appendonly yes --appendfsync always --dir /tmp/c'

Each writer puts records of its own, one after another, and notes each that was taken in a journal
of its own; readers read what is there, again and again; and several times a second one of them is
killed with SIGKILL and replaced. With --server, the server is started, killed in the middle and
started again; one that keeps all in memory, as moto's does, is --forgetful. At the end every noted
record must be there, and every record there must be one that a writer made.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from advisor.cache.config import Config
from advisor.cache.name import Name
from advisor.cache.reader import RecordFilter
from advisor.cache.record import Record
from advisor.cache.records import Records, be_patient
from advisor.cache.stores import open_store
from advisor.errors import RecordDamaged, StoreError

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.cache.examples import record

KILL_EVERY_S = 0.1
TARGETS = 40
"""Names that the records are of: readers look up one at a time, as apply() does."""


def made(writer: int, number: int) -> Record:
    """A record all of whose numbers follow from two, so that a mixture of two is told."""
    one = record(name=f"net{writer % TARGETS}.py:Net", created=1.7e9 + number, trials=20)
    return dataclasses.replace(
        one,
        trials=tuple(
            dataclasses.replace(t, number=number, config=Config(t.config, batch_size=writer + 1))
            for t in one.trials
        ),
        provenance=dataclasses.replace(one.provenance, seed=number, study=f"{writer}"),
    )


def is_whole(one: Record) -> bool:
    right = made(int(one.provenance.study), one.provenance.seed)
    # A lookup gives a record the name that it was asked for.
    return dataclasses.replace(one, target=right.target) == right


def write(url: str, journal: Path, writer: int, first: int) -> None:
    """Put records for ever; note in the journal what was taken, and what failed."""
    records = opened(url)
    number = first
    with journal.open("a") as log:
        while True:
            number += 1
            one = made(writer, number)
            try:
                records.put(one)
            except StoreError as exc:
                log.write(f"f {exc}\n")  # the server is away
                time.sleep(0.05)
            else:
                log.write(f"{number} {time.time()}\n")
            log.flush()


def read(url: str, journal: Path, seed: int) -> None:
    """Look up one target after another for ever; note how often, and what was wrong."""
    records = opened(url)
    dice = random.Random(seed)
    with journal.open("a") as log:
        while True:
            try:
                found = records.look_into(
                    records.stores[0], RecordFilter(target=f"net{dice.randrange(TARGETS)}.py:Net")
                )
            except StoreError as exc:
                log.write(f"f {exc}\n")
            else:
                bad = len(found.damaged), sum(not is_whole(held.record) for held in found.held)
                log.write(f"{len(found.held)} {bad[0]} {bad[1]}\n")
            log.flush()


def opened(url: str) -> Records:
    stores = [open_store(url)]
    be_patient(stores, 10.0)
    return Records(stores)


class Crowd:
    """Processes that are killed and replaced."""

    def __init__(self, url: str, folder: Path, writers: int, readers: int) -> None:
        self._context = multiprocessing.get_context("fork")
        self._url, self._folder = url, folder
        self._roles = [("w", n) for n in range(writers)] + [("r", n) for n in range(readers)]
        self._running: dict[tuple[str, int], Any] = {}
        self._lives = Counter[tuple[str, int]]()
        self.kills = 0

    def start(self, role: tuple[str, int]) -> None:
        kind, number = role
        life = self._lives[role]
        self._lives[role] += 1
        journal = self._folder / f"{kind}{number}"
        act, last = (write, life * 10**6) if kind == "w" else (read, number * 1000 + life)
        process = self._context.Process(target=act, args=(self._url, journal, number, last))
        if kind == "r":
            process = self._context.Process(target=act, args=(self._url, journal, last))
        process.start()
        self._running[role] = process

    def start_all(self) -> None:
        for role in self._roles:
            self.start(role)

    def kill_one(self, dice: random.Random) -> None:
        role = dice.choice(self._roles)
        self._end(role)
        self.kills += 1
        self.start(role)

    def died_alone(self) -> int:
        return sum(process.exitcode is not None for process in self._running.values())

    def end_all(self) -> None:
        for role in list(self._running):
            self._end(role)

    def _end(self, role: tuple[str, int]) -> None:
        process = self._running.pop(role)
        os.kill(process.pid, signal.SIGKILL)
        process.join()


class Server:
    """A command that serves the store; None for a store that needs none."""

    def __init__(self, command: str | None, prepare: str | None) -> None:
        self._command, self._prepare = command, prepare
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._command:
            quiet = subprocess.DEVNULL
            self._process = subprocess.Popen(shlex.split(self._command), stdout=quiet, stderr=quiet)
            time.sleep(3)
            if self._prepare:
                subprocess.run(self._prepare, shell=True, check=False, timeout=60)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()


def torture(url: str, given: argparse.Namespace) -> dict[str, Any]:
    server = Server(given.server, given.prepare)
    try:
        return tortured(url, given, server)
    finally:
        server.kill()


def tortured(url: str, given: argparse.Namespace, server: Server) -> dict[str, Any]:
    dice = random.Random(given.seed)
    server.start()
    with TemporaryDirectory() as name:
        folder = Path(name)
        crowd = Crowd(url, folder, given.writers, given.readers)
        crowd.start_all()
        began = time.monotonic()
        restarted = not given.server
        counted_from = 0.0
        while (spent := time.monotonic() - began) < given.seconds:
            time.sleep(KILL_EVERY_S)
            crowd.kill_one(dice)
            if not restarted and spent > given.seconds / 2:
                server.kill()
                time.sleep(1.0)
                server.start()
                restarted = True
                counted_from = time.time() if given.forgetful else 0.0
        faults = crowd.died_alone()
        crowd.end_all()
        taken = {
            (int(path.name[1:]), int(line.split()[0]))
            for path in folder.glob("w*")
            for line in whole_lines(path)
            if line[0] != "f" and float(line.split()[1]) > counted_from
        }
        refused = [line for p in folder.glob("w*") for line in whole_lines(p) if line[0] == "f"]
        reads = [line.split() for p in folder.glob("r*") for line in whole_lines(p)]
    looked = [list(map(int, parts)) for parts in reads if parts[0] != "f"]
    for why, count in Counter(refused).most_common(5):
        print(f"{count} x refused: {why[2:]}")
    there, unreadable, wrong = in_store(url)
    return {
        "writers": given.writers,
        "readers": given.readers,
        "seconds": given.seconds,
        "kills": crowd.kills,
        "server_killed": bool(given.server),
        "counted_since_restart": given.forgetful,
        "puts_taken": len(taken),
        "puts_refused": len(refused),
        "lookups": len(looked),
        "lookups_refused": len(reads) - len(looked),
        "records_seen": sum(parts[0] for parts in looked),
        "lost": len(taken - there),
        "unreadable": unreadable + sum(parts[1] for parts in looked),
        "wrong": wrong + sum(parts[2] for parts in looked),
        "processes_that_failed": faults,
    }


def whole_lines(path: Path) -> list[str]:
    """A killed process may leave its last line half written."""
    return path.read_text().rpartition("\n")[0].split("\n") if path.stat().st_size else []


def in_store(url: str) -> tuple[set[tuple[int, int]], int, int]:
    """(writer, number) of each record in the store, how many cannot be read, how many are wrong."""
    records = opened(url)
    store = records.stores[0]
    there, unreadable, wrong = set(), 0, 0
    names = [name.text for name in records.names(store)]
    for start in range(0, len(names), 64):
        for text, data in store.get_many(names[start : start + 64]).items():
            name = Name.parse(text)
            assert name is not None
            try:
                if isinstance(data, RecordDamaged):
                    raise data
                one = records.read(name, data)
            except RecordDamaged:
                unreadable += 1
                continue
            wrong += not is_whole(one)
            there.add((int(one.provenance.study), one.provenance.seed))
    return there, unreadable, wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--writers", type=int, default=32)
    parser.add_argument("--readers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", metavar="COMMAND", help="what serves the URL")
    parser.add_argument("--prepare", metavar="COMMAND", help="run after each start of the server")
    parser.add_argument(
        "--forgetful",
        action="store_true",
        help="the server keeps nothing over a kill: lost are those taken since its restart",
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    given = parser.parse_args()
    failed = False
    for url in given.urls:
        found = torture(url, given)
        scheme = url.partition(":")[0]
        import record as results  # here: it loads torch, which every forked process would carry

        print(scheme, json.dumps(found), flush=True)
        results.append("torture", {"store": scheme, "server": given.server, **found}, given.results)
        failed = failed or any(found[what] for what in ("lost", "unreadable", "wrong"))
    sys.exit(failed)


if __name__ == "__main__":
    main()
