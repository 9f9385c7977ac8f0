"""Shows which advice and warnings a script gets if something has changed since its tuning.

    python benchmarks/matching.py examples/conv.py --shape 64x3x256x256

The target must be tuned. Each case changes one field of its record, as if it had been made
elsewhere, stores it in a new store and looks the target up as a script would. Prints a table, and
appends it to the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import warnings
from pathlib import Path

import record as results
from rich.console import Console
from rich.table import Table
from torch import nn

import advisor
from advisor.cache.record import Record
from advisor.open_store import open_records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    args = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = advisor.lookup(args.target, shape=args.shape, strict=True).record
    assert record is not None
    rows = []
    table = Table("what has changed", "status", "served", "said", box=None)
    for name, changed in cases(record).items():
        rows.append(row := look_up(name, changed, args))
        table.add_row(*map(str, row.values()))
    Console(width=200).print(table)
    results.append("matching", {"target": args.target, "rows": rows}, args.results)


def cases(record: Record) -> dict[str, Record | None]:
    """Returns the changed record of each case; None if the script builds another model instead."""
    key = record.key
    device, software = key.environment.device, key.environment.software
    torch_version = software.torch.partition("+")[0].rpartition(".")

    def with_software(**changes: object) -> Record:
        other = dataclasses.replace(software, **changes)  # type: ignore[arg-type]
        return with_key(environment=dataclasses.replace(key.environment, software=other))

    def with_device(**changes: object) -> Record:
        other = dataclasses.replace(device, **changes)  # type: ignore[arg-type]
        return with_key(environment=dataclasses.replace(key.environment, device=other))

    def with_task(**changes: object) -> Record:
        return with_key(task=dataclasses.replace(key.task, **changes))  # type: ignore[arg-type]

    def with_key(**changes: object) -> Record:
        return dataclasses.replace(record, key=dataclasses.replace(key, **changes))  # type: ignore[arg-type]

    return {
        "nothing": record,
        "driver": with_software(driver="570.86.15"),
        "torch, a patch": with_software(torch=f"{torch_version[0]}.{int(torch_version[2]) + 1}"),
        "power limit": with_software(power_limit_w=400),
        "another GPU": with_device(name="NVIDIA H100 80GB HBM3", memory_gib=80),
        "sample": with_task(shapes=((*key.task.shapes[0][:-1], 999),)),
        "optimizer": with_task(optimizer="adamw"),
        "model": None,
    }


def look_up(name: str, changed: Record | None, args: argparse.Namespace) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if changed is not None:
            open_records(f"dir:{folder}").put(changed)
            advice = advisor.lookup(
                advisor.Model(args.target, optimizer="sgd"),
                shape=args.shape,
                store=f"dir:{folder}",
            )
        else:
            advice = advisor.lookup(args.target, shape=args.shape)
            advice.prepare(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)))
    return {
        "changed": name,
        "status": advice.status,
        "served": ", ".join(f"{k}={v}" for k, v in advice.config.items()) or "nothing",
        "said": " | ".join(str(one.message) for one in caught),
    }


if __name__ == "__main__":
    main()
