"""Measures the first lookup of a fresh process, without imports: one alone, and 64 at once.

    python benchmarks/apply_cost.py examples/conv.py --shape 64x3x256x256 \\
        disk:/tmp/a dir:/tmp/b 'redis://127.0.0.1:7000?timeout=1s' redis://127.0.0.1:1

The target must be tuned in the first store. The other stores are filled from it, if they can be
reached. Each process imports advisor and torch, waits for the others, looks the target up as
apply() does, and then 50 more times. `lookup` is the whole call, with the detection of the
environment (NVML); `store` is the store's share. An unreachable store shows the delay it adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import record as results

from advisor import Store
from advisor.errors import StoreError

PROBE = """
import json, sys, time
t0 = time.perf_counter()
import advisor
t1 = time.perf_counter()
import torch, warnings
import advisor.resolve.lookups, advisor.tuners.act.advice, advisor.tuners.target
import advisor.tuners.measure.workload
import advisor.tuners.environment, advisor.cache.stores.disk, advisor.cache.stores.dir
warnings.simplefilter("ignore")
if advisor.tuners.environment.default_device() != "cpu":
    import pynvml
target, shape, cache = sys.argv[1:]
shape = tuple(map(int, shape.split("x")))
print("ready", flush=True)
sys.stdin.readline()
t2, c2 = time.perf_counter(), time.process_time()
advice = advisor.lookup(target, shape=shape, store=cache)
t3, c3 = time.perf_counter(), time.process_time()
later = []
for _ in range(50):
    s = time.perf_counter()
    advisor.lookup(target, shape=shape, store=cache)
    later.append(time.perf_counter() - s)
stores = advice.explanation.stores
print(json.dumps({
    "status": advice.status,
    "import_advisor_s": t1 - t0,
    "lookup_s": t3 - t2,
    "lookup_cpu_s": c3 - c2,
    "store_s": sum(float(text.rpartition("(")[2].split()[0]) / 1e3
                   for _url, text in stores if text.endswith(" ms)")),
    "later_s": sorted(later)[25],
    "cuda_context": bool(torch.cuda.is_available() and torch.cuda.is_initialized()),
}))
"""


def probe(target: str, shape: str, cache: str, processes: int) -> list[dict[str, Any]]:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROBE, target, shape, cache],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    for process in running:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("a probe did not start")
    time.sleep(0.5)
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    rows = []
    for process in running:
        out, _err = process.communicate(timeout=600)
        if process.returncode:
            raise SystemExit(f"a probe failed with exit code {process.returncode}")
        rows.append(json.loads(out.splitlines()[-1]))
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"status": sorted({row["status"] for row in rows})}
    for what in ("lookup_s", "lookup_cpu_s", "store_s", "later_s", "import_advisor_s"):
        ms = sorted(1e3 * row[what] for row in rows)
        figures[what.removesuffix("_s") + "_ms"] = {
            "p50": round(statistics.median(ms), 2),
            "p99": round(ms[min(len(ms) - 1, int(0.99 * len(ms)))], 2),
        }
    figures["cuda_contexts"] = sum(row["cuda_context"] for row in rows)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("stores", nargs="+", metavar="URL")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--alone", type=int, default=20, help="processes that run one by one")
    parser.add_argument("--together", type=int, default=64, help="concurrent processes")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    summaries = {}
    for store in args.stores:
        filled = store == args.stores[0]
        if not filled:
            try:
                filled = bool(Store(args.stores[0]).sync(store))
            except StoreError as exc:
                print(f"{store}: not filled: {exc}", file=sys.stderr)
        samples = {
            "alone": [probe(args.target, args.shape, store, 1)[0] for _ in range(args.alone)],
            f"{args.together} at once": probe(args.target, args.shape, store, args.together),
        }
        name = store if filled else f"{store} (away)"
        for when, rows in samples.items():
            summaries.setdefault(name, {})[when] = figures = summary(rows)
            latencies = "   ".join(
                f"{what} {figures[f'{what}_ms']['p50']:.1f} / {figures[f'{what}_ms']['p99']:.1f}"
                for what in ("lookup", "store", "lookup_cpu", "later")
            )
            print(f"{name} {when}: ms p50 / p99: {latencies}  {figures['status']}", flush=True)
    results.append("apply_cost", {"target": args.target, "seen": summaries}, args.results)


if __name__ == "__main__":
    main()
