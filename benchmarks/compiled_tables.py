"""Adds modelled rows for compilation and CUDA graphs to tables for search_efficiency.py.

    python benchmarks/compiled_tables.py TABLES OUT

Copies every *.jsonl in TABLES whose rows have `precision`, `channels_last` and `batch_size` in
`config`. Each config gets more rows: the whole step as one graph, torch.compile's backend
cudagraphs, its modes "default" and "reduce-overhead", and a graph of a step compiled with
"default". These rows are modelled, not measured. The constants (FUSED, GRAPHED, FIRST_S) come from
two of these models on an H200 at one batch size. A graph nearly reaches the best speed of its
format and layout; compiling speeds that up; without a graph, the host still limits the speed. The
durations of first steps are ResNet-50's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FUSED = {"bf16": 1.37, "fp16": 1.0}
"""Speed-up by compilation; others: FUSED_32. An fp16 step gains nothing: it waits for its
gradient scaler."""
FUSED_32 = 1.2
GRAPHED = 0.82
"""Speed with one graph, at any batch size, as a share of the best of its format and layout."""
UNGRAPHED = 1.25
"""Largest speed-up over eager of compiled code without a graph."""
PASSES_GRAPHED = {"cudagraphs": 0.92, "reduce-overhead": 0.965}
"""Speed with graphs of the forward and backward pass, as a share of a whole-step graph's."""
FIRST_S = {"cudagraphs": 3.4, "default": 24.9, "reduce-overhead": 30.3}

KNOBS = 4
"""Knobs in a row of the grid. Rows with more knobs are not part of it and are left out."""
Row = dict[str, Any]


def format_and_layout(config: Row) -> tuple[str, bool]:
    return config["precision"], config["channels_last"]


def with_compiled(rows: list[Row]) -> Iterator[Row]:
    """Yields each row, followed by the compiled variants of its config."""
    rows = [row for row in rows if len(row["config"]) == KNOBS and not row.get("repeat")]
    ran = [row for row in rows if row.get("ok", True)]
    best: dict[tuple[str, bool], float] = {}
    for row in ran:
        group = format_and_layout(row["config"])
        best[group] = max(best.get(group, 0.0), row["samples_per_s"])
    for row in rows:
        config = row["config"] | {"step_graph": False, "compile": "none"}
        yield row | {"config": config}
        if row not in ran:
            continue
        fused = FUSED.get(config["precision"], FUSED_32)
        eager = row["samples_per_s"]
        graph = max(eager, GRAPHED * best[format_and_layout(config)])
        speeds = {(False, mode): share * graph for mode, share in PASSES_GRAPHED.items()}
        speeds[False, "reduce-overhead"] *= fused
        speeds[False, "default"] = min(fused * graph, UNGRAPHED * eager)
        speeds[True, "default"] = fused * graph
        speeds |= {(True, "none"): graph}
        for (captured, mode), speed in speeds.items():
            if captured and config["precision"] == "fp16":
                continue
            yield row | {
                "config": config | {"step_graph": captured, "compile": mode},
                "samples_per_s": speed,
                "first_step_s": row["first_step_s"] + FIRST_S.get(mode, 0.2),
            }


def main() -> int:
    source, out = map(Path, sys.argv[1:3])
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if {"precision", "channels_last", "batch_size"} <= rows[0].get("config", {}).keys():
            lines = "".join(json.dumps(row) + "\n" for row in with_compiled(rows))
            (out / path.name).write_text(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
