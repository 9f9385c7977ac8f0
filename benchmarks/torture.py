"""Kills writers and readers of a store at random: are records lost, damaged or wrong?

    python benchmarks/torture.py disk:/tmp/a dir:/tmp/b
    python benchmarks/torture.py 'redis://127.0.0.1:7000/0?timeout=5s' \\
        --server 'redis-server --port 7000 --appendonly yes --appendfsync always --dir /tmp/c'

Each writer puts records, one after another, and logs each accepted one in its journal. Readers
look records up all the time. Several times a second, one of these processes is killed with SIGKILL
and replaced. With --server, the server is started, killed halfway and restarted; a server that
keeps its data in memory, like moto's, is --forgetful. At the end, the store must contain every
logged record, and only records that a writer made.
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
from advisor.cache.records import Records
from advisor.errors import RecordDamaged, StoreError
from advisor.open_store import open_records

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.cache.examples import record

KILL_EVERY_S = 0.1
TARGETS = 40
"""Number of target names. A lookup is for one of them, as in apply()."""


def make_record(writer: int, number: int) -> Record:
    """Makes a record from two numbers, so that a mixture of two records is detected."""
    one = record(name=f"net{writer % TARGETS}.py:Net", created=1.7e9 + number, trials=20)
    return dataclasses.replace(
        one,
        trials=tuple(
            dataclasses.replace(t, number=number, config=Config(t.config, batch_size=writer + 1))
            for t in one.trials
        ),
        provenance=dataclasses.replace(one.provenance, seed=number, study=f"{writer}"),
    )


def is_intact(one: Record) -> bool:
    expected = make_record(int(one.provenance.study), one.provenance.seed)
    # A lookup renames the record to the requested target.
    return dataclasses.replace(one, target=expected.target) == expected


def write(url: str, journal: Path, writer: int, first: int) -> None:
    """Puts records until killed. Logs each accepted record and each failure."""
    records = connect(url)
    number = first
    with journal.open("a") as log:
        while True:
            number += 1
            one = make_record(writer, number)
            try:
                records.put(one)
            except StoreError as exc:
                log.write(f"f {exc}\n")  # the server is down
                time.sleep(0.05)
            else:
                log.write(f"{number} {time.time()}\n")
            log.flush()


def read(url: str, journal: Path, seed: int) -> None:
    """Looks up random targets until killed. Logs the records found and those that are bad."""
    records = connect(url)
    rng = random.Random(seed)
    with journal.open("a") as log:
        while True:
            try:
                result = records.look_into(
                    records.stores[0], RecordFilter(target=f"net{rng.randrange(TARGETS)}.py:Net")
                )
            except StoreError as exc:
                log.write(f"f {exc}\n")
            else:
                bad = len(result.damaged), sum(not is_intact(held.record) for held in result.held)
                log.write(f"{len(result.held)} {bad[0]} {bad[1]}\n")
            log.flush()


def connect(url: str) -> Records:
    return open_records(url)


class Workers:
    """Writer and reader processes that are killed and replaced."""

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

    def kill_one(self, rng: random.Random) -> None:
        role = rng.choice(self._roles)
        self._end(role)
        self.kills += 1
        self.start(role)

    def count_crashed(self) -> int:
        return sum(process.exitcode is not None for process in self._running.values())

    def end_all(self) -> None:
        for role in list(self._running):
            self._end(role)

    def _end(self, role: tuple[str, int]) -> None:
        process = self._running.pop(role)
        os.kill(process.pid, signal.SIGKILL)
        process.join()


class Server:
    """The server of a store; it does nothing if there is no command."""

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


def torture(url: str, args: argparse.Namespace) -> dict[str, Any]:
    server = Server(args.server, args.prepare)
    try:
        return measure(url, args, server)
    finally:
        server.kill()


def measure(url: str, args: argparse.Namespace, server: Server) -> dict[str, Any]:
    rng = random.Random(args.seed)
    server.start()
    with TemporaryDirectory() as name:
        folder = Path(name)
        workers = Workers(url, folder, args.writers, args.readers)
        workers.start_all()
        began = time.monotonic()
        restarted = not args.server
        counted_from = 0.0
        while (elapsed_s := time.monotonic() - began) < args.seconds:
            time.sleep(KILL_EVERY_S)
            workers.kill_one(rng)
            if not restarted and elapsed_s > args.seconds / 2:
                server.kill()
                time.sleep(1.0)
                server.start()
                restarted = True
                counted_from = time.time() if args.forgetful else 0.0
        crashed = workers.count_crashed()
        workers.end_all()
        accepted = {
            (int(path.name[1:]), int(line.split()[0]))
            for path in folder.glob("w*")
            for line in complete_lines(path)
            if line[0] != "f" and float(line.split()[1]) > counted_from
        }
        refused = [line for p in folder.glob("w*") for line in complete_lines(p) if line[0] == "f"]
        reads = [line.split() for p in folder.glob("r*") for line in complete_lines(p)]
    lookups = [list(map(int, parts)) for parts in reads if parts[0] != "f"]
    for why, count in Counter(refused).most_common(5):
        print(f"{count} x refused: {why[2:]}")
    stored, unreadable, wrong = read_all(url)
    return {
        "writers": args.writers,
        "readers": args.readers,
        "seconds": args.seconds,
        "kills": workers.kills,
        "server_killed": bool(args.server),
        "counted_since_restart": args.forgetful,
        "puts_taken": len(accepted),
        "puts_refused": len(refused),
        "lookups": len(lookups),
        "lookups_refused": len(reads) - len(lookups),
        "records_seen": sum(parts[0] for parts in lookups),
        "lost": len(accepted - stored),
        "unreadable": unreadable + sum(parts[1] for parts in lookups),
        "wrong": wrong + sum(parts[2] for parts in lookups),
        "processes_that_failed": crashed,
    }


def complete_lines(path: Path) -> list[str]:
    """Returns the complete lines of a file: a killed process may leave half a line."""
    return path.read_text().rpartition("\n")[0].split("\n") if path.stat().st_size else []


def read_all(url: str) -> tuple[set[tuple[int, int]], int, int]:
    """Returns (writer, number) of all records, and the numbers of unreadable and wrong ones."""
    records = connect(url)
    store = records.stores[0]
    stored, unreadable, wrong = set(), 0, 0
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
            wrong += not is_intact(one)
            stored.add((int(one.provenance.study), one.provenance.seed))
    return stored, unreadable, wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--writers", type=int, default=32)
    parser.add_argument("--readers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", metavar="COMMAND", help="starts a server for the URL")
    parser.add_argument("--prepare", metavar="COMMAND", help="run after each start of the server")
    parser.add_argument(
        "--forgetful",
        action="store_true",
        help="the server loses its data if killed: only check records put after its restart",
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    args = parser.parse_args()
    failed = False
    for url in args.urls:
        result = torture(url, args)
        scheme = url.partition(":")[0]
        import record as results  # late: forked processes must not load torch

        print(scheme, json.dumps(result), flush=True)
        results.append("torture", {"store": scheme, "server": args.server, **result}, args.results)
        failed = failed or any(result[what] for what in ("lost", "unreadable", "wrong"))
    sys.exit(failed)


if __name__ == "__main__":
    main()
