"""Two commands that were compared: lines of text, Markdown for a pull request, and plain data."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from advisor.cache.shown import size
from advisor.report.data import Table
from advisor.report.text import duration, rate
from advisor.tuners.measure.runner import Block
from advisor.two_commands import CommandsCompared

_COLUMNS = ("step", "samples/s", "waits for data", "peak memory", "loss (spread)")


def verdict(found: CommandsCompared) -> str:
    ratio, said = found.turns.ratio, found.turns.verdict
    said = f"B is {said} than A" if said in ("faster", "slower") else said
    known = f" ({ratio.low:.3f}-{ratio.high:.3f}, 95%)" if math.isfinite(ratio.high) else ""
    turns, why = len(found.turns.blocks[0]) // 2, f"; {found.reason}" if found.reason else ""
    return f"{said}: {ratio.mean:.3f}x as fast{known}, {turns} turns{why}"


def table(found: CommandsCompared) -> Table:
    shown, losses = Table("", ("", "command", *_COLUMNS), right=_COLUMNS), found.turns.losses()
    for at, side in enumerate(found.sides):
        speed = _speed(found.turns.blocks[at])
        loss = f"{losses.means[at]:.4g} ({losses.spreads[at]:.2g})" if losses else "-"
        cells = (duration(speed["step_s"]), rate(speed["samples_per_s"]), f"{speed['waited']:.0%}")
        shown.row(side.name, side.shown, *cells, size(int(speed["peak_bytes"])), loss)
    return shown


def _speed(blocks: Sequence[Block]) -> dict[str, float]:
    """Medians of the blocks of one command; `waited`: a share of the time."""
    step_s = statistics.median(one.step_s for one in blocks)
    return {
        "step_s": step_s,
        "samples_per_s": statistics.median(one.samples / one.steps for one in blocks) / step_s,
        "waited": statistics.median(min(1.0, one.waited_s / one.seconds) for one in blocks),
        "peak_bytes": max(one.peak_bytes for one in blocks),
    }


def lines(found: CommandsCompared) -> Iterator[str]:
    """Lines on the losses and on the speed."""
    if losses := found.turns.losses():
        beyond = "differ by more than" if losses.differ else "do not differ beyond"
        yield f"losses {beyond} their noise, over the same {losses.steps} steps"
    else:
        yield "losses are not compared, as too few steps passed a number to backward"
    yield verdict(found)


def markdown(found: CommandsCompared, note: str) -> str:
    """The result as Markdown, with a line such as what --fail-slower says; '' for none."""
    shown = table(found)
    rows = [list(shown.headings), ["---", "---", *("---:" for _ in _COLUMNS)]]
    rows += [[cell.replace("|", "&#124;") for cell in one.cells] for one in shown.rows]
    text = [*(f"- {line}" for line in (*lines(found), note) if line), ""]
    return "\n".join([*text, *(f"| {' | '.join(row)} |" for row in rows), ""])


def as_plain(found: CommandsCompared) -> dict[str, Any]:
    """The result as JSON. An end of the interval that is not known is null."""
    turns, losses = found.turns, found.turns.losses()
    ends = dataclasses.asdict(turns.ratio)
    return {
        "verdict": turns.verdict,
        "reason": found.reason,
        "ratio": {name: end if math.isfinite(end) else None for name, end in ends.items()},
        "turns": len(turns.blocks[0]) // 2,
        "measured_s": found.measured_s,
        "losses": losses._asdict() if losses else None,
        "A": {"command": found.sides[0].shown, **_speed(turns.blocks[0])},
        "B": {"command": found.sides[1].shown, **_speed(turns.blocks[1])},
    }
