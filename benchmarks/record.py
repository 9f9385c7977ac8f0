"""Appends results to benchmarks/results/: one JSON line each, with the environment."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from advisor.cache.codec import to_plain
from advisor.tuners.environment import default_device, detect, host_cpu

RESULTS = Path(__file__).with_name("results")


def append(name: str, result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Appends one result to NAME.jsonl, with the command, the time and the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    line = {
        "command": ["python", *_without("--results", sys.argv)],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": to_plain(detect(default_device())),
        "host_cpu": host_cpu(),
        **result,
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return path


def _without(option: str, words: list[str]) -> list[str]:
    """Removes an option and its value from a command."""
    if option not in words:
        return words
    index = words.index(option)
    return words[:index] + words[index + 2 :]
