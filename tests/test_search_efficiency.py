"""Replays the search from a table of simulated measurements, with the benchmark's command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.builders import BUILDS_S, COMPILING_S, MadeUp, space

ROOT = Path(__file__).resolve().parent.parent


def make_table(path: Path) -> None:
    """Writes a table in which some configs run out of memory and some rows have unknown values."""
    of = space(use="capture", batches=(64, 128, 256, 512))
    runner, rows = MadeUp(of.default), []
    for config in (one for batch in of.batches for one in of.configs(batch)):
        row = {
            "config": dict(config),
            "ok": not (config.batch == 512 and config["precision"] == "default"),
            "samples_per_s": 3000 * runner.speedup(config),
            "first_step_s": BUILDS_S.get(str(config["compile"]), COMPILING_S),
            "peak_bytes": config.batch * 10**8,
        }
        rows.append(row)
    for more in ({"precision": "fp8"}, {"combo_kernels": True}, {"compile": "fastest"}):
        rows.append({"config": {**of.default, **more}, "ok": True, "samples_per_s": 1e9})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_search_comes_within_ten_percent_of_the_best_config(tmp_path: Path) -> None:
    make_table(tmp_path / "made.jsonl")
    (tmp_path / "other.jsonl").write_text('{"workload": "x", "how": "eager"}\n')
    command = [sys.executable, "benchmarks/search_efficiency.py", str(tmp_path), "--seeds", "1"]
    done = subprocess.run(
        [*command, "--budgets", "300"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "other.jsonl: no rows of configs; skipped" in done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results.keys() == {"made"} and results["made"].keys() == {"fixed", "free"}
    for figures in results["made"].values():
        assert 0.9 <= figures["300s"]["found"] <= 1.0
