"""Charts, as files."""

from __future__ import annotations

from pathlib import Path

from advisor.cache.record import Record
from advisor.errors import UsageError
from advisor.report import charts

ENDINGS = (".png", ".svg")


def check(path: Path) -> None:
    """Refuse a chart that could not be written, before it is measured for minutes.

    Raises:
        UsageError: another ending than .png or .svg, no such folder, or matplotlib is missing.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"plot {str(path)!r}: expected a name that ends in .png or .svg")
    if not path.parent.is_dir():
        raise UsageError(f"plot {str(path)!r}: there is no folder {str(path.parent)!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise UsageError("a plot needs matplotlib; run: pip install matplotlib") from exc


def parts(record: Record, path: Path) -> None:
    """What each knob contributes: bars from 1x, with 95% intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chart = charts.parts(record)
    rows = chart.rows[::-1]
    figure, axis = plt.subplots(figsize=(7, 1.4 + 0.45 * len(rows)))
    for at, row in enumerate(rows):
        colour = "#2a6f97" if row.low > 1 else "#b0b7bd"
        axis.barh(at, row.value - 1, left=1, height=0.6, color=colour)
        reach = [[max(0.0, row.value - row.low)], [max(0.0, row.high - row.value)]]
        axis.errorbar(row.value, at, xerr=reach, color="black", capsize=3, linewidth=1)
    axis.set_yticks(range(len(rows)), [row.label for row in rows])
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel(chart.axis)
    device = record.key.environment.device.name
    axis.set_title(f"{record.target.name}, batch {record.batch}, {device}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
