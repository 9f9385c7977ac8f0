"""Tunes two targets at once on a server, each on a GPU, then both with `advisor tune`.

    python benchmarks/service_gpus.py --results service_gpus.jsonl --budget 150s \\
        torchvision:resnet50 64x3x224x224 torchvision:mobilenet_v3_large 64x3x224x224

Expected: both jobs ran at the same time on different GPUs, and their records are as good as those
of `advisor tune`, which has compile caches of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from advisor import Budget, Model, lookup, tune
from advisor.client import Client, Job

ADVISOR = [sys.executable, "-m", "advisor"]


def empty_caches(folder: str) -> dict[str, str]:
    """Returns environment variables that put the compile caches into an empty folder."""
    return {f"{name}_CACHE_DIR": f"{folder}/{name}" for name in ("TORCHINDUCTOR", "TRITON")}


def start_server(folder: Path) -> tuple[subprocess.Popen[str], str, str]:
    """Starts a server. Returns its process, address and admin token."""
    process = subprocess.Popen(
        [*ADVISOR, "serve", "--port", "0", "--database", f"sqlite:///{folder / 'service.db'}"],
        env=os.environ | {"XDG_CACHE_HOME": str(folder)} | empty_caches(str(folder / "server")),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    token, address = (process.stdout.readline().split()[-1] for _ in range(2))
    return process, address, token


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def wait_for(client: Client, job: Job) -> Job:
    while not (job := client.job(job.id)).over:
        time.sleep(1)
    return job


def figures(record: Any) -> dict[str, Any]:
    winner = record.winner(record.use)
    return {
        "config": {k: v for k, v in winner.config.items() if v != record.baseline.config.get(k)},
        "speedup": round(winner.speedup, 3),
        "interval": [round(winner.speedup_low, 3), round(winner.speedup_high, 3)],
        "samples_per_s": round(winner.samples_per_s, 1),
        "trials": len(record.trials),
        "verified": [t.measurement.reason for t in record.trials if t.stage == "numerics"],
        "uses": {
            one.use: [round(one.choice.speedup, 3), dict(one.choice.config)]
            for one in record.winners
            if not one.free
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--budget", default="150s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--alone", action="store_true", help="skip the tunings by hand")
    parser.add_argument("targets", nargs="+", metavar="TARGET SHAPE")
    args = parser.parse_args()
    pairs = list(zip(args.targets[::2], args.targets[1::2], strict=True))
    extra: dict[str, Any] = {"gpus": 0} if args.device == "cpu" else {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        server, address, token = start_server(Path(name))
        os.environ["ADVISOR_TOKEN"] = token
        try:
            client = Client(address)
            sent = [client.submit(t, shape=s, budget=args.budget, **extra) for t, s in pairs]
            jobs = list(pool.map(lambda job: wait_for(client, job), sent))
            cache = f"{address}?timeout=10s"
            looked_up = [
                lookup(Model(t, device=args.device), shape=_shape(s), store=cache) for t, s in pairs
            ]
        finally:
            server.terminate()
            server.wait()

        os.environ |= empty_caches(str(Path(name) / "hand"))

        def by_hand(number: int) -> Any:
            target, shape = pairs[number]
            device = "cpu" if args.device == "cpu" else f"cuda:{number}"
            cache = str(Path(name) / f"hand{number}")
            model, budget = Model(target, device=device), Budget(time=args.budget)
            return tune(model, shape=_shape(shape), budget=budget, store=cache).record

        if args.alone:
            manual = []
        else:
            manual = list(pool.map(by_hand, range(len(pairs)))) if not extra else [by_hand(0)]
    with args.results.open("a") as file:
        for number, (job, advice) in enumerate(zip(jobs, looked_up, strict=True)):
            row = {
                "target": pairs[number],
                "budget": args.budget,
                "state": job.state,
                "reason": job.reason,
                "attempts": list(job.attempts),
                "by the server": advice.record and figures(advice.record),
                "by hand": figures(manual[number]) if number < len(manual) else None,
            }
            file.write(json.dumps(row) + "\n")
            print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
