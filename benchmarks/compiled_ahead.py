"""What building configs at once gains, and whether it disturbs what is timed beside it.

    python benchmarks/compiled_ahead.py torchvision:resnet50 64x3x224x224 --alone
    python benchmarks/compiled_ahead.py torchvision:efficientnet_v2_s 32x3x300x300 --beside

Four configs that compile are built at once with empty caches, each in a process of its own; then a
worker measures each with what they left on disk. `--alone`: the same one after the other before it,
with caches of their own. `--beside`: an eager workload is timed in turns of a second before, while
and after they are built (A A B B ... A A): `disturbed` is by how much it is slower meanwhile, with
the spread of the quiet turns; what is under 0.5% could be overlapped. Prints lines, then one of
JSON. On one H200 about five minutes each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import record as results

from advisor.cache.config import Config, Value
from advisor.cache.task import Task
from advisor.cli.options import environment
from advisor.tuners import host
from advisor.tuners.environment import default_device
from advisor.tuners.knobs import BY_NAME, described, plain
from advisor.tuners.measure.first_step import empty_caches
from advisor.tuners.measure.runner import Built
from advisor.tuners.measure.worker.ahead import Ahead
from advisor.tuners.measure.worker.parent import Worker
from advisor.tuners.measure.worker.wire import Job

HALF: dict[str, Value] = {"precision": "bf16", "channels_last": True}
ON_CUDA: tuple[dict[str, Value], ...] = (
    HALF | {"compile": "default", "step_graph": True},
    HALF | {"compile": "reduce-overhead"},
    HALF | {"compile": "default", "precision": "fp16"},
    HALF | {"compile": "default", "precision": "tf32"},
)
ON_CPU: tuple[dict[str, Value], ...] = ({"compile": "default"}, HALF | {"compile": "default"})
TURNS = 12
DEADLINE_S = 400.0


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Compilers' caches on disk that hold nothing, for all that is started meanwhile."""
    emptied = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with emptied as folder, environment(empty_caches(folder)):
        yield


def building(ahead: Ahead, configs: Sequence[Config]) -> tuple[float, dict[Config, Built]]:
    """(Seconds by the wall clock, what became of each)."""
    began = time.monotonic()
    built = ahead.build(configs, room=len(configs), deadline_s=DEADLINE_S)
    return time.monotonic() - began, built


def turns(worker: Worker, config: Config, more: Callable[[int], bool]) -> list[float]:
    """Samples/s of a workload that is kept, a turn a second."""
    found: list[float] = []
    while more(len(found)):
        found.append(worker.measure(config, seconds=1.0, keep=True).samples_per_s)
    return found


def beside(
    worker: Worker, eager: Config, ahead: Ahead, configs: Sequence[Config]
) -> tuple[float, dict[Config, Built], dict[str, object]]:
    """As `building`, with what an eager workload did meanwhile."""
    quiet = turns(worker, eager, lambda count: count < TURNS + 1)[1:]
    done: list[tuple[float, dict[Config, Built]]] = []
    neighbours = threading.Thread(target=lambda: done.append(building(ahead, configs)))
    neighbours.start()
    busy = turns(worker, eager, lambda _count: neighbours.is_alive())
    neighbours.join()
    quiet += turns(worker, eager, lambda count: count < TURNS)
    worker.release()
    told: dict[str, object] = {
        "quiet": [round(rate, 1) for rate in quiet],
        "busy": [round(rate, 1) for rate in busy],
        "disturbed": round(1 - statistics.median(busy) / statistics.median(quiet), 4),
        "spread": round(statistics.stdev(quiet) / statistics.mean(quiet), 4),
    }
    print(f"disturbed by {told['disturbed']:.2%}, quiet turns spread {told['spread']:.2%}")
    return *done[0], told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("shape", help="of a batch, as 64x3x224x224")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--results", type=Path, help="folder to append the figures to")
    given = parser.parse_args()
    task = Task.of(given.target, {"shape": given.shape})
    job = Job(task=task, device=given.device, seed=0)
    default = plain(task, given.device)
    on_cuda = given.device.startswith("cuda")
    absent: dict[str, Value] = {
        name: BY_NAME[name].default for name in ("step_graph", "compile") if on_cuda
    }
    eager = default | absent
    configs = [eager | changes for changes in (ON_CUDA if on_cuda else ON_CPU)]
    names = [described(config, eager) for config in configs]
    told: dict[str, object] = {"target": given.target, "cores": host.cores(), "configs": names}
    if given.alone:
        with nothing_compiled(), Worker(job, deadline_s=DEADLINE_S) as worker:
            worker.describe()
            alone = {c: building(Ahead(job, worker), [c])[0] for c in configs}
        told["alone_s"] = [round(seconds, 1) for seconds in alone.values()]
        print(f"one after the other {sum(alone.values()):.0f} s: {told['alone_s']}")
    with nothing_compiled(), Worker(job, deadline_s=DEADLINE_S) as worker:
        facts = worker.describe()
        ahead = Ahead(job, worker)
        told["room"] = ahead.room(facts.peak_bytes)
        if given.beside:
            workload = eager | (HALF if on_cuda else {})
            seconds, built, told["beside"] = beside(worker, workload, ahead, configs)
        else:
            seconds, built = building(ahead, configs)
        told["at_once_s"] = round(seconds, 1)
        told["each_s"] = [round(built[config].seconds, 1) for config in configs]
        told["outcomes"] = [built[config].measurement.outcome for config in configs]
        told["cold_s"] = [round(built[config].measurement.first_step_s, 1) for config in configs]
        print(f"at once {seconds:.0f} s: {told['each_s']} {told['outcomes']}; room {told['room']}")
        warm = [worker.measure(config, seconds=1.0, deadline_s=DEADLINE_S) for config in configs]
    told["warm_s"] = [round(one.first_step_s, 1) for one in warm]
    told["samples_per_s"] = [round(one.samples_per_s, 1) for one in warm]
    print(f"first steps after it {told['warm_s']}, samples/s {told['samples_per_s']}")
    if given.results:
        results.append("compiled_ahead", told, given.results)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
