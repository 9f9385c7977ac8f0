"""The search, replayed from a table that it does not know, by the benchmark's own command."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def make_table(path: Path, seed: int) -> None:
    """A wide table: compile modes that cost 50 times as much, interactions, an edge of memory; and
    rows that no task permits, or that no version knows."""
    draw = random.Random(seed)
    choices: dict[str, list[object]] = {
        "precision": ["default", "tf32", "bf16", "fp16"],
        "channels_last": [False, True],
        "cudnn_benchmark": [False, True],
        "compile": ["none", "cudagraphs", "default", "reduce-overhead"],
        "batch_size": [64, 128, 256, 512],
    }
    single = {(n, str(v)): draw.gauss(0, 0.12) for n, vs in choices.items() for v in vs}
    first = {"none": 0.2, "cudagraphs": 4.0, "default": 20.0, "reduce-overhead": 25.0}
    rows = []
    for values in itertools.product(*choices.values()):
        config = dict(zip(choices, values, strict=True))
        batch = int(str(config["batch_size"]))
        logs = sum(single[n, str(v)] for n, v in config.items() if n != "batch_size")
        logs += 0.2 * math.log2(batch / 64) * (1 if config["compile"] == "none" else 0.4)
        row = {
            "config": config,
            "ok": not (batch == 512 and config["precision"] == "default"),
            "samples_per_s": 3000 * math.exp(logs),
            "first_step_s": first[str(config["compile"])],
            "peak_bytes": batch * 10**8,
        }
        rows.append(row)
    base = rows[0]["config"]
    assert isinstance(base, dict)
    for more in ({"precision": "fp8"}, {"combo_kernels": True}, {"compile": "fastest"}):
        rows.append({"config": base | more, "ok": True, "samples_per_s": 1e9})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_search_comes_near_the_best_within_its_budget(tmp_path: Path) -> None:
    make_table(tmp_path / "made.jsonl", seed=5)
    (tmp_path / "other.jsonl").write_text('{"workload": "x", "how": "eager"}\n')
    command = [sys.executable, "benchmarks/search_efficiency.py", str(tmp_path), "--seeds", "1"]
    done = subprocess.run(
        [*command, "--budgets", "300"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "other.jsonl: no rows of configs; skipped" in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"made"} and found["made"].keys() == {"fixed", "free"}
    for figures in found["made"].values():
        assert 0.9 <= figures["300s"]["found"] <= 1.0
