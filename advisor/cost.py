"""What the samples of a run cost: FLOPs, and their share of the device's peak."""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from advisor.cache.codec import from_plain
from advisor.cache.config import Config
from advisor.cache.domain import Amount, Count
from advisor.cache.key import Device
from advisor.cache.record import Record

PEAKS = Path(__file__).with_name("peaks.csv")
"""Dense peaks in TFLOPS, 0 for none, by a pattern of NVML's name of a GPU. Half precision
accumulates in float32. Where a document has figures with sparsity alone, a row has half of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The map `Record.cost`. `flops`: of a sample, forward and backward, of which `convolved` are
    of convolutions; 0 if unknown. `uncounted`: operators that `flops` lacks, or why it is 0.
    `epoch`: samples of all processes, or 0; `price`: money per hour, or 0."""

    flops: Amount = 0.0
    convolved: Amount = 0.0
    uncounted: str = ""
    epoch: Count = 0
    price: Amount = 0.0

    @classmethod
    def of(cls, record: Record) -> Cost:
        """Raises RecordDamaged if a value is outside its domain."""
        return from_plain(cls, dict(record.cost))


@functools.cache
def _peaks() -> list[dict[str, str]]:
    with PEAKS.open(newline="") as file:
        return [*csv.DictReader(file)]


def peak_of(device: Device) -> dict[str, str]:
    """The row of PEAKS; empty for an unknown device, and for a slice of one (MIG)."""
    rows = (row for row in _peaks() if re.fullmatch(row["name"], device.name))
    return {} if device.mig else next(rows, {})


def mfu(record: Record, config: Config, samples_per_s: float) -> float:
    """The share of the peak of its GPUs that a run reaches with a config, for the config's number
    format; 0 if the FLOPs or the peak are unknown. By torch's default, convolutions use TF32, and
    matrix products do not."""
    cost, task, row = Cost.of(record), record.key.task, peak_of(record.key.environment.device)
    precision = str(config.get("precision", "default"))
    names = ("tf32", "fp32") if precision == "default" else (precision, precision)
    convolving, other = (float(row.get(name, 0)) for name in names)
    if not other or task.dtype == "float64":
        return 0.0
    convolved = min(cost.convolved, cost.flops)
    least_s = convolved / (convolving or other) + (cost.flops - convolved) / other
    return samples_per_s * least_s / (1e12 * task.processes)
