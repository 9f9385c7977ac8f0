"""Measures the load that one `advisor serve` can handle, on SQLite and on PostgreSQL.

    python benchmarks/service.py                # about 20 minutes
    python benchmarks/service.py --records 1000 --seconds 1 --databases sqlite

The server is a process of its own that checks every token. The clients are one more process on the
same machine, or 64 processes that call advisor.lookup(). The database is filled with synthetic
records by SQL, after a check that a row inserted by SQL equals one stored by the API. Prints all
figures, and appends them to the results.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import record as results
from http_clients import Request, run_clients, send_at_rate
from sqlalchemy import insert, text

sys.path.insert(0, str(Path(__file__).parents[1]))
import made_up
from made_up import POPULAR, READER, RECORDS_PER_MODEL

import advisor
from advisor.cache.match import Query
from advisor.cache.name import Name
from advisor.cache.reader import RecordFilter
from advisor.cache.record import Target
from advisor.cache.stores.http import HttpStore
from advisor.open_store import open_records
from advisor.service import attempts, tokens
from advisor.service.database import Database
from advisor.service.executors import Capacity
from advisor.service.schema import Item
from tests.cache import servers
from tests.service.serving import begun
from tests.service.test_serve import Process

TARGET = str(Path(__file__).parents[1] / "examples" / "conv.py")
SHAPE = (4, 3, 32, 32)
CLIENTS = (1, 100, 1000)
WORKERS = 50
UNKNOWN = "e" * 64


class Bench:
    """A server and its database, which holds the records of `models` models."""

    def __init__(self, url: str, seconds: float, rounds: int) -> None:
        self._url, self._seconds, self._rounds = url, seconds, rounds
        self.process = Process("--database", url, "--executor", "none")
        self.database = Database(url)
        self.models = 0
        self.templates = made_up.make_templates()
        self.readers, self.workers = self._tokens("read", 40), self._tokens("worker", WORKERS)
        self.figures: list[dict[str, Any]] = []
        self._check_copies()

    def _check_copies(self) -> None:
        """Asserts that a row inserted by SQL equals one stored by the API."""
        row = self.templates[0].copy_for(9 * 10**6)
        url = f"http://127.0.0.1:{self.process.port}?timeout=20s"
        store = HttpStore(url, token=self.workers[0])
        store.put(row["key"], row["data"])
        with self.database.writing() as session:
            stored = session.get_one(Item, row["key"])
            for name in row.keys() - {"stored", "token"}:
                assert getattr(stored, name) == row[name], name
            session.delete(stored)
            session.flush()
            session.execute(insert(Item), [row])
        assert store.get(row["key"]) == row["data"]
        with self.database.writing() as session:
            session.delete(session.get_one(Item, row["key"]))

    def _tokens(self, role: str, count: int) -> list[str]:
        with self.database.writing() as session:
            return [tokens.make(session, f"{role}-{n}", role, None, None)[1] for n in range(count)]

    def fill(self, until: int) -> float:
        """Adds records up to a total of `until`. Returns the number added per second."""
        began, before = time.monotonic(), self.models * RECORDS_PER_MODEL
        while self.models * RECORDS_PER_MODEL < until:
            rows = [
                one.copy_for(model)
                for model in range(self.models, min(self.models + 250, until // RECORDS_PER_MODEL))
                for one in self.templates
            ]
            READER.read(Name.parse(rows[0]["key"]), rows[0]["data"])  # type: ignore[arg-type]
            with self.database.writing() as session:
                session.execute(insert(Item), rows)
            self.models += len(rows) // RECORDS_PER_MODEL
        if not self._url.startswith("sqlite"):
            with self.database.writing() as session:
                session.execute(text("ANALYZE records"))
        return (until - before) / (time.monotonic() - began)

    def size(self) -> int:
        """Returns the size of the database in bytes."""
        if self._url.startswith("sqlite"):
            return sum(one.stat().st_size for one in Path(self._url[10:]).parent.glob("bench.db*"))
        with self.database.reading() as session:
            size = session.scalar(text("SELECT pg_database_size(current_database())"))
            return int(size or 0)

    # Requests

    def lookups(self, kind: str) -> Iterator[Request]:
        """Yields lookups by the model ('hit', or 'miss' for one that was never tuned), by a target
        name that a tenth of the models share ('popular', or 'popular, edited' for code that was
        never tuned), or of similar records, as a tuning sends them ('kin')."""
        rng = random.Random(0)
        key = self.templates[0].record.key
        query = Query(environment=key.environment, given={"shapes": key.task.shapes})
        while True:
            model = rng.randrange(self.models // 10) * 10 + 1
            digest = UNKNOWN if kind == "miss" else made_up.fingerprint_of(model)
            code = made_up.code_of(model) if kind == "popular" else UNKNOWN[:16]
            wanted = RecordFilter(model=digest, query=replace(query, model=digest))
            if kind.startswith("popular"):
                wanted = RecordFilter(
                    target=POPULAR, query=query, now=Target(name=POPULAR, code=code, origin="0e")
                )
            if kind == "kin":
                wanted = RecordFilter(
                    similar_to=replace(key, model=digest), family=self.templates[0].record.family
                )
            plain = {
                name: json.dumps(value) if name == "wanted" else value
                for name, value in wanted.question().items()
            }
            path = f"/api/lookup?{urlencode(plain, doseq=True)}"
            yield Request("GET", path, rng.choice(self.readers))

    def writes(self) -> Iterator[Request]:
        """Yields uploads of records of new models."""
        for model, token in zip(itertools.count(10**6), itertools.cycle(self.workers)):
            for one in self.templates:
                row = one.copy_for(model)
                path = f"/api/records/{quote(row['key'])}"
                yield Request("PUT", path, token, row["data"], expected=201)

    def submissions(self) -> Iterator[Request]:
        """Yields submissions of different jobs, 200 for each token, which is the limit."""
        submit_tokens = [token for token in self._tokens("submit", 100) for _ in range(200)]
        for seed, token in enumerate(submit_tokens):
            job = {"command": ["python", "train.py"], "options": {"seed": seed}}
            yield Request("POST", "/api/jobs", token, json.dumps(job).encode(), expected=201)

    def beats(self) -> Iterator[Request]:
        """Yields heartbeats of a hundred attempts, each with a trial and five lines of its log."""
        with self.database.writing() as session:
            claims = [attempts.claim(session, "here", Capacity(gpu="", gpus=1)) for _ in range(100)]
        attempt_tokens = [begun(self.database, one) for one in claims if one is not None]
        for number in itertools.count():
            for token in attempt_tokens:
                trial = {"number": number, "what": "precision=bf16", "samples_per_s": 1e3}
                beat = {"trials": [trial], "log": f"trial {number}\n" * 5}
                yield Request("POST", "/api/attempt/beat", token, json.dumps(beat).encode())

    # Measurements

    def measure(self, what: str, requests: Iterator[Request], clients: int) -> None:
        """Measures clients that each have a connection and send one request after another."""
        rates, took, cpu = [], [], 0.0
        for _round in range(self._rounds):
            before, began = self._cpu(), time.monotonic()
            times = asyncio.run(run_clients(self.process.port, requests, clients, self._seconds))
            rates.append(len(times) / (time.monotonic() - began))
            cpu += self._cpu() - before
            took += times
        self._log(what, clients, took, rates, 1e3 * cpu / len(took))

    def burst(self, clients: int, rounds: int) -> None:
        """Measures clients that connect at the same moment, send one request and disconnect."""
        before, took, rates, requests = self._cpu(), [], [], self.lookups("hit")
        for _round in range(rounds):
            times = asyncio.run(run_clients(self.process.port, requests, clients, 0.0))
            rates.append(clients / max(times))
            took += times
        self._log("burst", clients, took, rates, 1e3 * (self._cpu() - before) / len(took))

    def steady(self, rate: float) -> None:
        """Measures lookups at a fixed rate, each by a new client."""
        before = self._cpu()
        times = asyncio.run(send_at_rate(self.process.port, self.lookups("hit"), rate, 20))
        cpu_ms = 1e3 * (self._cpu() - before) / len(times)
        self._log("steady", 1, times, [rate], cpu_ms)

    def tune(self) -> None:
        """Measures a tuning, which stores a record for this machine, and a list of records."""
        url = f"http://127.0.0.1:{self.process.port}?timeout=1s"
        os.environ |= {"ADVISOR_TOKEN": self.workers[0], "ADVISOR_CACHE": url}
        words = ["--shape", "x".join(map(str, SHAPE)), "--device", "cpu", "--budget", "5s"]
        tune = [sys.executable, "-m", "advisor", "tune", TARGET, *words, "--quiet"]
        self._time("tune", lambda: subprocess.run(tune, check=True, stdout=subprocess.DEVNULL))
        self._time("show", lambda: open_records(None).newest(200))

    def _time(self, what: str, act: Callable[[], object]) -> None:
        before, began = self._cpu(), time.monotonic()
        act()
        seconds = time.monotonic() - began
        self._log(what, 1, [seconds] * 2, [1 / seconds], 1e3 * (self._cpu() - before))

    def measure_lookup(self, max_processes: int) -> None:
        """Measures advisor.lookup() in forked processes: the first call of each, and, after all
        of these, a second one on the same connection."""
        fork = multiprocessing.get_context("fork")

        def once(barrier: Any, queue: Any) -> None:
            warnings.simplefilter("ignore")
            for turn in ("first", "again"):
                barrier.wait()
                began = time.perf_counter()
                status = advisor.lookup(advisor.Model(TARGET, device="cpu"), shape=SHAPE).status
                queue.put((turn, time.perf_counter() - began, status))

        for processes in (1, max_processes):
            before, times = self._cpu(), []
            for _round in range(5):
                barrier, queue = fork.Barrier(processes), fork.SimpleQueue()
                args = barrier, queue
                started = [fork.Process(target=once, args=args) for _ in range(processes)]
                for one in started:
                    one.start()
                times += [queue.get() for _turn in range(2) for _one in started]
                for one in started:
                    one.join()
            cpu_ms = 1e3 * (self._cpu() - before) / len(times)
            for turn in ("first", "again"):
                took = [seconds for which, seconds, _status in times if which == turn]
                rates = [processes / max(took)]
                self._log(f"advisor.lookup(), {turn}", processes, took, rates, cpu_ms)
                counted = Counter(status for which, _seconds, status in times if which == turn)
                self.figures[-1]["status"] = dict(counted)
                print(counted)

    def _cpu(self) -> float:
        """Returns the CPU seconds that the server has used."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def _log(
        self, what: str, clients: int, took: list[float], rates: list[float], cpu_ms: float
    ) -> None:
        ms = [1e3 * seconds for seconds in took]
        cuts = statistics.quantiles(ms, n=100, method="inclusive")
        figure = {
            "what": what,
            "database": self._url.partition(":")[0].partition("+")[0],
            "records": self.models * RECORDS_PER_MODEL,
            "clients": clients,
            "asked": len(ms),
            "a_second": round(statistics.median(rates), 1),
            "a_second_from_to": [round(min(rates), 1), round(max(rates), 1)],
            "p50_ms": round(cuts[49], 2),
            "p99_ms": round(cuts[98], 2),
            "most_ms": round(max(ms), 2),
            "server_cpu_ms": round(cpu_ms, 2),
            "load": round(os.getloadavg()[0], 1),
        }
        self.figures.append(figure)
        print(" | ".join(map(str, figure.values())), flush=True)

    def close(self) -> None:
        self.database.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.stop(15)


def bench(url: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    one = Bench(url, args.seconds, args.rounds)
    try:
        for number in args.records:
            rate = one.fill(number)
            print(
                f"{number} records: {one.size() / 2**20:.0f} MiB, {rate:.0f} a second", flush=True
            )
            for kind in ("hit", "miss", "popular", "popular, edited", "kin"):
                one.measure(f"lookup: {kind}", one.lookups(kind), 1)
            one.figures[-1]["database_mib"] = round(one.size() / 2**20, 1)
        for clients in CLIENTS:
            for kind in ("hit", "miss", "popular"):
                one.measure(f"lookup: {kind}", one.lookups(kind), clients)
        one.steady(args.hosts / 600)
        one.burst(1000, rounds=2)
        one.burst(64, rounds=10)
        one.tune()
        one.measure_lookup(64)
        one.measure("write", one.writes(), WORKERS)
        one.measure("submit", one.submissions(), WORKERS)
        one.measure("beat", one.beats(), 100)
    finally:
        one.close()
    return one.figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"])
    parser.add_argument("--records", nargs="+", type=int, default=[10**3, 10**4, 10**5])
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=10_000, help="job starts in 10 minutes")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    args = parser.parse_args()
    for kind in args.databases:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            os.environ["XDG_DATA_HOME"] = folder
            url = f"sqlite:///{folder}/bench.db"
            if kind == "postgresql":
                server = stack.enter_context(servers.postgresql(durable=True))
                url = f"postgresql+psycopg://advisor@127.0.0.1:{server.port}/postgres"
            results.append("service", {"figures": bench(url, args)}, args.results)


if __name__ == "__main__":
    main()
