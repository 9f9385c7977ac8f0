"""Constants that steer decisions are few: each asks what it replaces."""

from __future__ import annotations

import ast
from pathlib import Path

DECISIONS = Path(__file__).resolve().parents[2] / "tuners" / "decisions.py"


def test_constants_that_decide_are_few() -> None:
    tree = ast.parse(DECISIONS.read_text())
    assigned = [one for node in tree.body if isinstance(node, ast.Assign) for one in node.targets]
    names = [n.id for one in assigned for n in ast.walk(one) if isinstance(n, ast.Name)]
    assert len(names) <= 40, names
