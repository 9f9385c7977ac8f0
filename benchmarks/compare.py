"""torch's default, the usual guide and advisor's advice in one process, measured in turn.

    python benchmarks/compare.py torchvision:resnet50 --shape 64x3x224x224

Tune the target first: the advice is looked up as a training script would. Prints samples/s and
the ratios to torch's default with their 95% intervals, and appends them to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import record as results

import advisor
from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.tuners.measure.worker.child import Bench
from advisor.tuners.measure.worker.wire import Job
from advisor.tuners.search.race import paired_ratio, race

GUIDE = {"precision": "bf16", "channels_last": True, "cudnn_benchmark": True}


class Here:
    """A Runner in this very process: no worker, as in a training script."""

    def __init__(self, job: Job) -> None:
        self._bench = Bench(job)

    def measure(
        self, config: Config, *, seconds: float, stage: str = "compute", keep: bool = False
    ) -> Measurement:
        return self._bench.measure(config, seconds, stage, keep)

    def release(self) -> None:
        self._bench.release()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--mode", default="train")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--seconds", type=float, default=0.5, help="timed, of one turn")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for all turns")
    parser.add_argument("--free", action="store_true", help="also the advice with the batch free")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    given = parser.parse_args()
    shape = tuple(map(int, given.shape.split("x")))

    advice = advisor.lookup(given.target, shape=shape, mode=given.mode, strict=True)
    assert advice.record is not None
    held = advice.record
    default = held.baseline.config
    known = {name: value for name, value in GUIDE.items() if name in default}
    configs = {
        "default": default,
        "guide": default.replace(**known),
        "advice": held.at_batch.config,
    }
    if given.free and held.free is not None:
        configs["advice, batch free"] = held.free.config
    runner = Here(
        Job(
            target=given.target,
            arguments=dict(held.target.arguments),
            shape=shape[1:],
            dtype=given.dtype,
            vocab=given.vocab,
            batch=shape[0],
            mode=given.mode,
            optimizer=given.optimizer,
            deterministic=held.key.permits.deterministic,
            device=str(advice.device),
            max_memory=0,
            seed=1,
        )
    )
    rates = race(
        runner, list(configs.values()), share_s=given.seconds, budget_s=given.budget, drop=False
    )
    rows = {}
    for name, config in configs.items():
        seen = rates.get(config)
        if not seen:
            print(f"{name:<20} did not run")
            continue
        ratio = paired_ratio(seen, rates[default])
        median = statistics.median(seen)
        rows[name] = {
            "config": dict(config),
            "samples_per_s": median,
            "turns": seen,
            "x_default": ratio.mean,
            "low": ratio.low,
            "high": ratio.high,
        }
        print(
            f"{name:<20} {median:>12,.1f} samples/s   {ratio.mean:.3f}x "
            f"({ratio.low:.3f}-{ratio.high:.3f})   {dict(config)}"
        )
    claimed = held.at_batch.samples_per_s
    off = rows["advice"]["samples_per_s"] / claimed - 1
    print(
        f"the record claims {claimed:,.1f} samples/s: {off:+.1%} here; "
        f"ratio {held.at_batch.speedup:.3f} claimed, {rows['advice']['x_default']:.3f} here"
    )
    path = results.append(
        "compare",
        {
            "target": given.target,
            "shape": given.shape,
            "rows": rows,
            "claimed_samples_per_s": claimed,
            "claimed_x_default": held.at_batch.speedup,
            "record": held.id,
        },
        given.results,
    )
    print(f"appended to {path.name}")


if __name__ == "__main__":
    main()
