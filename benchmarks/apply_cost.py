"""What apply() costs: import, first lookup in a fresh process, later ones; in 1 and 64 processes.

    python benchmarks/apply_cost.py TARGET --shape 64x3x224x224

Tune the target first. torch's own import is measured apart: a training script pays it anyway.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import record as results

PROBE = """
import json, sys, time
t0 = time.perf_counter()
import advisor
t1 = time.perf_counter()
assert "torch" not in sys.modules
import torch
import advisor.api, advisor.tuners.advice, advisor.tuners.environment, advisor.tuners.target
import advisor.cache.disk
if advisor.tuners.environment.default_device() != "cpu":
    import pynvml
t2 = time.perf_counter()
advice = advisor.lookup(sys.argv[1], shape=tuple(map(int, sys.argv[2].split("x"))), strict=True)
t3 = time.perf_counter()
later = []
for _ in range(50):
    s = time.perf_counter()
    advisor.lookup(sys.argv[1], shape=tuple(map(int, sys.argv[2].split("x"))), strict=True)
    later.append(time.perf_counter() - s)
s = time.perf_counter()
advice.set_flags()
flags = time.perf_counter() - s
context = torch.cuda.is_available() and torch.cuda.is_initialized()
print(json.dumps({"import_advisor_s": t1 - t0, "first_lookup_s": t3 - t2,
                  "later_lookup_s": sorted(later)[25], "set_flags_s": flags,
                  "cuda_context": bool(context)}))
"""


def probe(target: str, shape: str, processes: int) -> list[dict[str, float]]:
    running = [
        subprocess.Popen([sys.executable, "-c", PROBE, target, shape], stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    found = []
    for process in running:
        out, _err = process.communicate(timeout=600)
        if process.returncode:
            raise SystemExit(f"a probe failed with exit code {process.returncode}")
        found.append(json.loads(out.splitlines()[-1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--alone", type=int, default=5, help="processes one after another")
    parser.add_argument("--together", type=int, default=64, help="processes at once")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    given = parser.parse_args()
    seen = {
        "alone": [probe(given.target, given.shape, 1)[0] for _ in range(given.alone)],
        f"{given.together} at once": probe(given.target, given.shape, given.together),
    }
    table = {}
    for name, rows in seen.items():
        table[name] = {
            what: {
                "median": statistics.median(row[what] for row in rows),
                "max": max(row[what] for row in rows),
            }
            for what in rows[0]
        }
        for what, values in table[name].items():
            if what != "cuda_context":
                print(
                    f"{name:<12} {what:<18} median {values['median'] * 1e3:9.3f} ms   "
                    f"max {values['max'] * 1e3:9.3f} ms"
                )
    results.append("apply_cost", {"target": given.target, "seen": table}, given.results)


if __name__ == "__main__":
    main()
