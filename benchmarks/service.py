"""What one `advisor serve` can take, on SQLite and on PostgreSQL.

    python benchmarks/service.py                # some twenty minutes
    python benchmarks/service.py --records 1000 --seconds 1 --databases sqlite

A server of its own, a process as a shell starts it, with every token checked; the clients are one
more process on the same machine, and 64 of them where advisor.lookup() is called. Its database is
filled in steps with made-up records, by SQL, of which one is compared with what the API makes of
it; then it is asked. Prints all figures, and appends them to the results.
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
from http_clients import Asked, at_a_rate, at_once
from sqlalchemy import insert, text

sys.path.insert(0, str(Path(__file__).parents[1]))
import made_up
from made_up import A_MODEL, POPULAR, READER

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
    """A server, its database, and what is in that: the records of so many models."""

    def __init__(self, url: str, seconds: float, rounds: int) -> None:
        self._url, self._seconds, self._rounds = url, seconds, rounds
        self.process = Process("--database", url, "--executor", "none")
        self.database = Database(url)
        self.models = 0
        self.copied = made_up.of_a_model()
        self.readers, self.workers = self._tokens("read", 40), self._tokens("worker", WORKERS)
        self.figures: list[dict[str, Any]] = []
        self._compare()

    def _compare(self) -> None:
        """What is filled by SQL is what the API keeps, and gives."""
        made = self.copied[0].at(9 * 10**6)
        url = f"http://127.0.0.1:{self.process.port}?timeout=20s"
        store = HttpStore(url, token=self.workers[0])
        store.put(made["key"], made["data"])
        with self.database.writing() as session:
            kept = session.get_one(Item, made["key"])
            for name in made.keys() - {"stored", "token"}:
                assert getattr(kept, name) == made[name], name
            session.delete(kept)
            session.flush()
            session.execute(insert(Item), [made])
        assert store.get(made["key"]) == made["data"]
        with self.database.writing() as session:
            session.delete(session.get_one(Item, made["key"]))

    def _tokens(self, role: str, count: int) -> list[str]:
        with self.database.writing() as session:
            return [tokens.make(session, f"{role}-{n}", role, None, None)[1] for n in range(count)]

    def fill(self, until: int) -> float:
        """Make it so many records; how many a second."""
        began, there = time.monotonic(), self.models * A_MODEL
        while self.models * A_MODEL < until:
            rows = [
                one.at(model)
                for model in range(self.models, min(self.models + 250, until // A_MODEL))
                for one in self.copied
            ]
            READER.read(Name.parse(rows[0]["key"]), rows[0]["data"])  # type: ignore[arg-type]
            with self.database.writing() as session:
                session.execute(insert(Item), rows)
            self.models += len(rows) // A_MODEL
        if not self._url.startswith("sqlite"):
            with self.database.writing() as session:
                session.execute(text("ANALYZE records"))
        return (until - there) / (time.monotonic() - began)

    def size(self) -> int:
        """Bytes of the database."""
        if self._url.startswith("sqlite"):
            return sum(one.stat().st_size for one in Path(self._url[10:]).parent.glob("bench.db*"))
        with self.database.reading() as session:
            found = session.scalar(text("SELECT pg_database_size(current_database())"))
            return int(found or 0)

    # What is asked.

    def lookups(self, by: str) -> Iterator[Asked]:
        """Of a script that has its model in hand ('hit'; 'miss', which nobody has tuned), of one
        that names a target as a tenth of all are called ('popular'; 'popular, edited', whose code
        nobody has tuned), or of a tuning ('kin')."""
        rng = random.Random(0)
        key = self.copied[0].record.key
        query = Query(environment=key.environment, given={"shapes": key.task.shapes})
        while True:
            model = rng.randrange(self.models // 10) * 10 + 1
            of = UNKNOWN if by == "miss" else made_up.fingerprint_of(model)
            code = made_up.code_of(model) if by == "popular" else UNKNOWN[:16]
            sought = RecordFilter(model=of, query=replace(query, model=of))
            if by.startswith("popular"):
                sought = RecordFilter(
                    target=POPULAR, query=query, now=Target(name=POPULAR, code=code, origin="0e")
                )
            if by == "kin":
                sought = RecordFilter(
                    similar_to=replace(key, model=of), family=self.copied[0].record.family
                )
            plain = {
                name: json.dumps(value) if name == "wanted" else value
                for name, value in sought.question().items()
            }
            path = f"/api/lookup?{urlencode(plain, doseq=True)}"
            yield Asked("GET", path, rng.choice(self.readers))

    def writes(self) -> Iterator[Asked]:
        """Records of models that are not there yet."""
        for model, token in zip(itertools.count(10**6), itertools.cycle(self.workers)):
            for one in self.copied:
                row = one.at(model)
                path = f"/api/records/{quote(row['key'])}"
                yield Asked("PUT", path, token, row["data"], expected=201)

    def submissions(self) -> Iterator[Asked]:
        """Jobs, none like another; each token may have 200."""
        senders = [token for token in self._tokens("submit", 100) for _ in range(200)]
        for seed, token in enumerate(senders):
            asked = {"command": ["python", "train.py"], "options": {"seed": seed}}
            yield Asked("POST", "/api/jobs", token, json.dumps(asked).encode(), expected=201)

    def beats(self) -> Iterator[Asked]:
        """Of a hundred attempts, each with a trial and a line of its log."""
        with self.database.writing() as session:
            claims = [attempts.claim(session, "here", Capacity(gpu="", gpus=1)) for _ in range(100)]
        own = [begun(self.database, one) for one in claims if one is not None]
        for number in itertools.count():
            for token in own:
                trial = {"number": number, "what": "precision=bf16", "samples_per_s": 1e3}
                said = {"trials": [trial], "log": f"trial {number}\n" * 5}
                yield Asked("POST", "/api/attempt/beat", token, json.dumps(said).encode())

    # What is measured.

    def measure(self, what: str, asked: Iterator[Asked], clients: int) -> None:
        """So many clients, each with its connection, one request after another."""
        rates, took, cpu = [], [], 0.0
        for _round in range(self._rounds):
            before, began = self._cpu(), time.monotonic()
            seen = asyncio.run(at_once(self.process.port, asked, clients, self._seconds))
            rates.append(len(seen) / (time.monotonic() - began))
            cpu += self._cpu() - before
            took += seen
        self._say(what, clients, took, rates, 1e3 * cpu / len(took))

    def burst(self, clients: int, rounds: int) -> None:
        """Each connects, asks once and hangs up, all at the same moment; nobody before."""
        before, took, rates, asked = self._cpu(), [], [], self.lookups("hit")
        for _round in range(rounds):
            seen = asyncio.run(at_once(self.process.port, asked, clients, 0.0))
            rates.append(clients / max(seen))
            took += seen
        self._say("burst", clients, took, rates, 1e3 * (self._cpu() - before) / len(took))

    def steady(self, a_second: float) -> None:
        """Lookups at a fixed rate, each by a client of its own."""
        before = self._cpu()
        seen = asyncio.run(at_a_rate(self.process.port, self.lookups("hit"), a_second, 20))
        cpu_ms = 1e3 * (self._cpu() - before) / len(seen)
        self._say("steady", 1, seen, [a_second], cpu_ms)

    def tune(self) -> None:
        """Have a record that this machine can use; list what is there."""
        url = f"http://127.0.0.1:{self.process.port}?timeout=1s"
        os.environ |= {"ADVISOR_TOKEN": self.workers[0], "ADVISOR_CACHE": url}
        words = ["--shape", "x".join(map(str, SHAPE)), "--device", "cpu", "--budget", "5s"]
        tune = [sys.executable, "-m", "advisor", "tune", TARGET, *words, "--quiet"]
        self._once("tune", lambda: subprocess.run(tune, check=True, stdout=subprocess.DEVNULL))
        self._once("show", lambda: open_records(None).newest(200))

    def _once(self, what: str, act: Callable[[], object]) -> None:
        before, began = self._cpu(), time.monotonic()
        act()
        took = time.monotonic() - began
        self._say(what, 1, [took, took], [1 / took], 1e3 * (self._cpu() - before))

    def applied(self, most: int) -> None:
        """advisor.lookup() in as many processes, forked from this one: the first of each, and when
        all have had that, the second, on the same connection."""
        fork = multiprocessing.get_context("fork")

        def once(together: Any, said: Any) -> None:
            warnings.simplefilter("ignore")
            for turn in ("first", "again"):
                together.wait()
                began = time.perf_counter()
                status = advisor.lookup(advisor.Model(TARGET, device="cpu"), shape=SHAPE).status
                said.put((turn, time.perf_counter() - began, status))

        for processes in (1, most):
            before, seen = self._cpu(), []
            for _round in range(5):
                together, said = fork.Barrier(processes), fork.SimpleQueue()
                args = together, said
                started = [fork.Process(target=once, args=args) for _ in range(processes)]
                for one in started:
                    one.start()
                seen += [said.get() for _turn in range(2) for _one in started]
                for one in started:
                    one.join()
            cpu_ms = 1e3 * (self._cpu() - before) / len(seen)
            for turn in ("first", "again"):
                took = [seconds for which, seconds, _status in seen if which == turn]
                rates = [processes / max(took)]
                self._say(f"advisor.lookup(), {turn}", processes, took, rates, cpu_ms)
                counted = Counter(status for which, _seconds, status in seen if which == turn)
                self.figures[-1]["status"] = dict(counted)
                print(counted)

    def _cpu(self) -> float:
        """Seconds that the server has computed."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def _say(
        self, what: str, clients: int, took: list[float], rates: list[float], cpu_ms: float
    ) -> None:
        ms = [1e3 * seconds for seconds in took]
        cuts = statistics.quantiles(ms, n=100, method="inclusive")
        figure = {
            "what": what,
            "database": self._url.partition(":")[0].partition("+")[0],
            "records": self.models * A_MODEL,
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


def bench(url: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    one = Bench(url, given.seconds, given.rounds)
    try:
        for number in given.records:
            rate = one.fill(number)
            print(
                f"{number} records: {one.size() / 2**20:.0f} MiB, {rate:.0f} a second", flush=True
            )
            for by in ("hit", "miss", "popular", "popular, edited", "kin"):
                one.measure(f"lookup: {by}", one.lookups(by), 1)
            one.figures[-1]["database_mib"] = round(one.size() / 2**20, 1)
        for clients in CLIENTS:
            for by in ("hit", "miss", "popular"):
                one.measure(f"lookup: {by}", one.lookups(by), clients)
        one.steady(given.hosts / 600)
        one.burst(1000, rounds=2)
        one.burst(64, rounds=10)
        one.tune()
        one.applied(64)
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
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=10_000, help="that start a job in 10 minutes")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    given = parser.parse_args()
    for kind in given.databases:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            os.environ["XDG_DATA_HOME"] = folder
            url = f"sqlite:///{folder}/bench.db"
            if kind == "postgresql":
                server = stack.enter_context(servers.postgresql(durable=True))
                url = f"postgresql+psycopg://advisor@127.0.0.1:{server.port}/postgres"
            results.append("service", {"figures": bench(url, given)}, given.results)


if __name__ == "__main__":
    main()
