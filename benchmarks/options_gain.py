"""What options of Inductor, of attention and of cuDNN gain over the best that is advised.

    python benchmarks/options_gain.py --seconds 290
    python benchmarks/options_gain.py --models vit_b_16,gpt2 --options combo_kernels

For each model a step compiled whole and replayed as one CUDA graph, with and without each option,
both in one process and timed in turn, in blocks that are synchronised at their ends. Each option
has a process and an empty cache of its own; what it is held against has a warm one after the first.
Models are spread over the GPUs that there are, one at a time on each. One JSON line a result: the
ratio of the steps' speed with its 95% interval, and the seconds of both first steps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import record as results
import torch
from torch import cuda, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from advisor.cache.config import Config
from advisor.cache.task import Task
from advisor.tuners import known_wrong, target
from advisor.tuners.act.advice import Advice
from advisor.tuners.blocks import repeated
from advisor.tuners.measure.made_up import Feed
from advisor.tuners.measure.workload import Workload
from advisor.tuners.search.race import paired

ROUNDS, TURN_S = 12, 0.25
GPT2 = str(Path(__file__).resolve().parent.parent / "examples" / "gpt2.py:GPT2")
IMAGES = {"shapes": ((64, 3, 224, 224),)}
CONVOLVING = Config(precision="bf16", channels_last=True, step_graph=True)
ATTENDING = Config(precision="bf16", step_graph=True)

MODELS: dict[str, tuple[dict[str, Any], Config]] = {
    "resnet50": ({"target": "torchvision:resnet50", **IMAGES}, CONVOLVING),
    "mobilenet_v3_large": ({"target": "torchvision:mobilenet_v3_large", **IMAGES}, CONVOLVING),
    "vit_b_16": ({"target": "torchvision:vit_b_16", **IMAGES}, ATTENDING),
    "gpt2": (
        {"target": GPT2, "shapes": ((8, 1024),), "dtype": "int64", "vocab": 50304},
        ATTENDING,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is set while a model is compiled and its step recorded.

    Attributes:
        inductor: options of torch.compile.
        blocks: only the blocks that repeat are compiled.
        during: sets what is no option of Inductor's.
        only: configs that it is tried with.
    """

    inductor: Mapping[str, Any] = field(default_factory=dict)
    blocks: bool = False
    during: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    only: tuple[Config, ...] = (CONVOLVING, ATTENDING)


NOTHING = Option()


@contextlib.contextmanager
def searching(limit: int) -> Iterator[None]:
    """cudnn.benchmark, with so many algorithms tried; 0 for all."""
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, limit
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = False


def cudnn_first() -> contextlib.AbstractContextManager[Any]:
    order = (
        *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
        *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    )
    return sdpa_kernel(list(order), set_priority=True)


OPTIONS = {
    "blocks": Option(blocks=True, only=(ATTENDING,)),
    "mix_order_reduction": Option(inductor={"triton.mix_order_reduction": True}),
    "sdpa_cudnn_first": Option(during=cudnn_first, only=(ATTENDING,)),
    "cudnn_benchmark": Option(during=lambda: searching(10), only=(CONVOLVING,)),
    "cudnn_benchmark_limit_0": Option(during=lambda: searching(0), only=(CONVOLVING,)),
    "combo_kernels": Option(inductor={"combo_kernels": True}),
    "max_autotune_gemm": Option(
        inductor={"max_autotune_gemm": True, "max_autotune_conv_backends": "ATEN"}
    ),
    "coordinate_descent_tuning": Option(inductor={"coordinate_descent_tuning": True}),
}
"""By the seconds they cost, about. What they are held against is as advised: without mixed orders,
where they are known to be wrong."""


def compiled(task: Task, config: Config, option: Option, device: str) -> tuple[Workload, float]:
    """A workload whose step has come to its replays, and the seconds that took."""
    loaded = target.load(target.parse(task.target), task.model_args)
    plainly = loaded.factory

    def factory() -> nn.Module:
        model = plainly()
        for part in repeated(model) if option.blocks else [model]:
            # As `dynamic` differs, what was compiled for the other is not taken for this one.
            how = {**known_wrong.avoided(), **option.inductor}
            part.compile(options=how, dynamic=None if option is NOTHING else False)
        return model

    loaded = dataclasses.replace(loaded, factory=factory)
    begun = time.perf_counter()
    with option.during():
        advice = Advice(config, device=device, batch_size=task.batch)
        workload = Workload(loaded, task, advice, Feed(batch=task.batch, seed=0))
        workload.start()
        synchronize(device)
    return workload, time.perf_counter() - begun


def synchronize(device: str) -> None:
    if device != "cpu":
        cuda.synchronize()


def rate(workload: Workload, steps: int, device: str) -> float:
    """Steps/s."""
    begun = time.perf_counter()
    for _ in range(steps):
        workload.step()
    synchronize(device)
    return steps / (time.perf_counter() - begun)


@contextlib.contextmanager
def cached_in(folder: str) -> Iterator[None]:
    """Inductor and Triton keep what they compile there."""
    held = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=f"{folder}/triton")
    try:
        yield
    finally:
        for name, value in held.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def compare(given: dict[str, Any], config: Config, option: Option, warm: str, device: str) -> Any:
    """One option against none, in this process."""
    task = Task(**given)
    with cached_in(warm):
        was_warm = Path(warm, "fxgraph").exists()
        plain, plain_first = compiled(task, config, NOTHING, device)
    with tempfile.TemporaryDirectory() as cold, cached_in(cold):
        other, other_first = compiled(task, config, option, device)
        both = (plain, other)
        steps = [max(1, round(TURN_S * rate(one, 10, device))) for one in both]
        rates: tuple[list[float], list[float]] = ([], [])
        for turn in range(ROUNDS):
            for at in (0, 1) if turn % 2 else (1, 0):
                rates[at].append(rate(both[at], steps[at], device))
        found = paired(rates[1], rates[0])
    return {
        "ratio": round(found.mean, 4),
        "low": round(found.low, 4),
        "high": round(found.high, 4),
        "step_ms": round(1000 / max(rates[0]), 3),
        "first_step_s": round(other_first, 1),
        "first_step_without_s": round(plain_first, 1),
        "without_was_cached": was_warm,
    }


def measured(model: str, option: str, warm: str, gpu: int, deadline: float) -> dict[str, Any]:
    """One comparison, in a process of its own that is ended at the deadline."""
    command = [sys.executable, __file__, "--one", model, option, warm]
    process = subprocess.Popen(
        command,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, told = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"failed": "no time was left"}
    if process.returncode:
        return {"failed": next(iter(told.strip().splitlines()[-1:]), "")[:300]}
    found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return found


def compare_all(
    model: str, given: argparse.Namespace, caches: str, gpu: int, deadline: float
) -> None:
    """The options of one model, one after the other on one GPU, each told at once."""
    for name in given.options.split(","):
        if MODELS[model][1] in OPTIONS[name].only:
            found = measured(model, name, f"{caches}/{model}", gpu, deadline)
            line = {"model": model, "option": name, "torch": torch.__version__, **found}
            print(json.dumps(line), flush=True)
            results.append("options_gain", line, given.results)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--options", default=",".join(OPTIONS))
    parser.add_argument("--seconds", type=float, default=290.0)
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "OPTION", "CACHE"))
    given = parser.parse_args()
    if given.one:
        model, option, warm = given.one
        print(json.dumps(compare(*MODELS[model], OPTIONS[option], warm, "cuda")))
        return
    models: queue.SimpleQueue[str] = queue.SimpleQueue()
    for model in given.models.split(","):
        models.put(model)
    deadline = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as caches:

        def work(gpu: int) -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    compare_all(models.get_nowait(), given, caches, gpu, deadline)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(cuda.device_count())]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
