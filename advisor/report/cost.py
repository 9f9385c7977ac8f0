"""What the steps of a run cost: FLOPs, their share of the device's peak, energy and money."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.cache.record import Record
from advisor.cost import Cost, mfu, peak_of
from advisor.report.data import Section, Table
from advisor.report.text import cut

_MILLION = 1_000_000  # samples whose price is shown if the length of an epoch is not known


def sections(record: Record, price: float | None = None) -> Iterator[Section]:
    """Generator: yields the cost, if a record has one; `price`: as in `Cost`, if not its own."""
    if not record.cost:
        return
    cost = Cost.of(record)
    samples, price = cost.epoch or _MILLION, cost.price if price is None else price
    if not price and record.key.environment.device.kind == "cpu":
        return  # no peak and no energy counter are known
    per = "epoch" if cost.epoch else f"{samples:,} samples"
    numbers = ("TFLOPS", "MFU", "J/sample", *[f"money/{per}"] * bool(price))
    table = Table("FLOPs, energy and money", ("", *numbers), right=numbers, whole=("",))
    money = {}
    for name, one in record.choices.items():
        share, rate = mfu(record, one.config, one.samples_per_s), cost.flops * one.samples_per_s
        money[one.config] = price / 3600 * samples / one.samples_per_s
        cells = [f"{rate / 1e12:.3g}" * bool(rate) or "-", f"{share:.1%}" * bool(share) or "-"]
        cells += [f"{one.joules:.3g}" * bool(one.joules) or "-"]
        table.row(name, *cells, *[f"{money[one.config]:.4g}"] * bool(price))
    lines = [*_lines(record, cost)]
    less = money[record.baseline.config] - money[record.winner(record.use).config]
    if price and less:
        size = f", of {samples:,} samples" * bool(cost.epoch)
        lines.append(f"At {price:g} an hour, the advice saves {less:.4g} per {per}{size}.")
    yield Section("cost", "What it costs", table, tuple(lines))


def _lines(record: Record, cost: Cost) -> Iterator[str]:
    device, left_out = record.key.environment.device, cut(cost.uncounted)
    if cost.flops:
        whole = f"{cost.flops * record.batch / 1e9:,.4g} GFLOP"
        yield f"A step of {record.batch:,} samples has {whole}, forward and backward."
        if left_out:
            yield f"The true FLOPs and MFU are higher, because these are not counted: {left_out}."
    else:
        yield f"The FLOPs are not counted: {left_out or 'no step was seen'}."
    if row := peak_of(device):
        source = f"{row['document of NVIDIA']}, {row['year']}"
        yield f"MFU is the share of the dense peak of the config's number format ({source})."
    else:
        yield f"No MFU: no peak is known for {device.name}{' MIG ' * bool(device.mig)}{device.mig}."
    if record.baseline.joules:
        yield "The energy is that of the whole GPU, by NVML; other processes on it count too."
    else:
        yield f"No energy: NVML reads no energy counter of {device.name}."
