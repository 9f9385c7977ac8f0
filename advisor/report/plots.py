"""A chart as a file, drawn by matplotlib."""

from __future__ import annotations

from pathlib import Path

from advisor.cache.record import Record
from advisor.errors import UsageError
from advisor.report.sections import parts_chart

ENDINGS = (".png", ".svg")


def check(path: Path) -> None:
    """Check that a chart can be drawn, before minutes of measuring.

    Raises:
        UsageError: the name does not end in .png or .svg, or matplotlib is missing.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"plot {str(path)!r}: expected a name that ends in .png or .svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise UsageError("a plot needs matplotlib; run: pip install matplotlib") from exc


def parts(record: Record, path: Path) -> None:
    """Draw what each knob contributes: bars from 1x, with 95% intervals."""
    from matplotlib.figure import Figure

    chart = parts_chart(record)
    labels, ratios, lows, highs = zip(*chart.rows[::-1], strict=True)
    figure = Figure(figsize=(7, 1.4 + 0.45 * len(labels)), layout="tight")
    axis = figure.subplots()
    axis.barh(
        labels,
        [ratio - 1 for ratio in ratios],
        left=1,
        height=0.6,
        color=["#2a6f97" if low > 1 else "#b0b7bd" for low in lows],
        xerr=[
            [max(0.0, ratio - low) for ratio, low in zip(ratios, lows, strict=True)],
            [max(0.0, high - ratio) for ratio, high in zip(ratios, highs, strict=True)],
        ],
        error_kw={"capsize": 3},
    )
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel(chart.axis)
    device = record.key.environment.device.name
    axis.set_title(f"{record.target.name}, batch {record.batch}, {device}", fontsize=10)
    figure.savefig(path, dpi=150)
