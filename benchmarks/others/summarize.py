"""Prints Markdown tables of the results of run_others.py.

    python benchmarks/others/summarize.py others.jsonl [MORE.jsonl ...]

If a script has several results for a commit, the last one counts.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = (
    "| script | best trial | advised | verified | `advisor run` | spread | of best trial | tuned in"
    " | last loss before, after |",
    "|---|---|---|---|---|---|---|---|---|",
)


def main() -> None:
    lines = [
        json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()
    ]
    by_commit: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        by_commit.setdefault(line["commit"], {})[line["script"]] = line
    for commit, results in by_commit.items():
        print(f"Commit {commit or 'unknown'}\n", *HEAD, sep="\n")
        print(*map(row, results.values()), sep="\n")
        print(f"\n{means(results.values())}\n")


def row(line: dict[str, Any]) -> str:
    """Formats one script as a row of the table."""
    if "ratio" not in line:
        return f"| {line['script']} | {line.get('left_out') or 'failed'} |" + " |" * 7
    low, high = line["spread"] or (None, None)
    kept = line["ratio"] / line["best_trial"] if line["ratio"] and line["best_trial"] else None
    notes = " (stopped)" if line.get("stopped") else ""
    cells = (
        line["script"] + notes,
        times(line["best_trial"]),
        times(line["advised"]),
        {True: "yes", False: "no"}.get(line["verified"], "-"),
        times(line["ratio"]) + (" (a start failed)" if any(line["failed_starts"].values()) else ""),
        f"{times(low)} to {times(high)}" if low else "-",
        f"{kept:.0%}" if kept else "-",
        f"{line['tune_s']:.0f} s" if line["tune_s"] else "-",
        f"{last_loss(line, 'as_it_is')}, {last_loss(line, 'advisor_run')}",
    )
    return "| " + " | ".join(cells) + " |"


def times(ratio: float | None) -> str:
    return f"{ratio:.2f}x" if ratio else "-"


def last_loss(line: dict[str, Any], way: str) -> str:
    """The last loss that the last start printed."""
    starts = line["losses"][way]
    return f"{starts[-1]['last'][-1]:.4g}" if starts and starts[-1]["last"] else "-"


def means(lines: Iterable[dict[str, Any]]) -> str:
    """Returns the geometric means over the scripts that were measured both ways."""
    both = [line for line in lines if line.get("ratio") and line.get("best_trial")]
    if not both:
        return "No script was measured both ways."
    ran = geometric_mean(line["ratio"] for line in both)
    best = geometric_mean(line["best_trial"] for line in both)
    verified = sum(bool(line["verified"]) for line in both)
    return (
        f"Geometric mean of {len(both)} scripts: `advisor run` {ran:.2f}x, best trial {best:.2f}x,"
        f" `advisor run` / best trial {ran / best:.2f}. {verified} verified."
    )


def geometric_mean(ratios: Iterable[float]) -> float:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


if __name__ == "__main__":
    main()
