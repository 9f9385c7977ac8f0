"""Measured tables, extended by what compiling and graphs would give: for search_efficiency.py.

    python benchmarks/compiled_tables.py TABLES OUT

Every *.jsonl in TABLES whose rows have `precision`, `channels_last` and `batch_size` in `config` is
written to OUT with more rows for each config: the whole step as one graph, torch.compile's backend
cudagraphs, its modes "default" and "reduce-overhead", and a graph over a step compiled with
"default". They are modelled, not measured, after what two of these models gave on an H200 at one
batch (FUSED, GRAPHED, FIRST_S): a graph brings a step to what its format and layout reach at the
largest batch, compiling makes that faster, and what is compiled without a graph still waits for the
host. First steps are those of ResNet-50.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FUSED = {"bf16": 1.37, "fp16": 1.0}
"""As many times faster a step is with what is compiled, an fp16 one that waits for its scaler not;
others: FUSED_32."""
FUSED_32 = 1.2
GRAPHED = 0.82
"""Of what a format and layout reach at the largest batch, in one graph at any."""
UNGRAPHED = 1.25
"""As many times faster than eager at most, compiled without a graph."""
OF_GRAPH = {"cudagraphs": 0.92, "reduce-overhead": 0.965}
"""Graphs of the forward and backward pass alone, beside one of the whole step."""
FIRST_S = {"cudagraphs": 3.4, "default": 24.9, "reduce-overhead": 30.3}

KNOBS = 4
"""Of the grids; rows with more are single ones beside it."""
Row = dict[str, Any]


def alike(config: Row) -> tuple[str, bool]:
    return config["precision"], config["channels_last"]


def extended(rows: list[Row]) -> Iterator[Row]:
    """The rows, each with its compiled ones."""
    rows = [row for row in rows if len(row["config"]) == KNOBS and not row.get("repeat")]
    ran = [row for row in rows if row.get("ok", True)]
    reach: dict[tuple[str, bool], float] = {}
    for row in ran:
        kind = alike(row["config"])
        reach[kind] = max(reach.get(kind, 0.0), row["samples_per_s"])
    for row in rows:
        config = row["config"] | {"step_graph": False, "compile": "none"}
        yield row | {"config": config}
        if row not in ran:
            continue
        fused = FUSED.get(config["precision"], FUSED_32)
        eager = row["samples_per_s"]
        graph = max(eager, GRAPHED * reach[alike(config)])
        rates = {(False, mode): share * graph for mode, share in OF_GRAPH.items()}
        rates[False, "reduce-overhead"] *= fused
        rates[False, "default"] = min(fused * graph, UNGRAPHED * eager)
        rates[True, "default"] = fused * graph
        rates |= {(True, "none"): graph}
        for (captured, mode), rate in rates.items():
            if captured and config["precision"] == "fp16":
                continue
            yield row | {
                "config": config | {"step_graph": captured, "compile": mode},
                "samples_per_s": rate,
                "first_step_s": row["first_step_s"] + FIRST_S.get(mode, 0.2),
            }


def main() -> int:
    source, out = map(Path, sys.argv[1:3])
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if {"precision", "channels_last", "batch_size"} <= rows[0].get("config", {}).keys():
            lines = "".join(json.dumps(row) + "\n" for row in extended(rows))
            (out / path.name).write_text(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
