"""What options of Inductor, of attention and of cuDNN gain over the best that is advised.

    python benchmarks/options_gain.py --seconds 290
    python benchmarks/options_gain.py --models vit_b_16,gpt2 --options combo_kernels
    python benchmarks/options_gain.py --device cpu --models mnist --options nothing,combo_kernels

For each model a step compiled whole and replayed as one CUDA graph, with and without each option.
First all of them are compiled, several at once, each with caches of its own; then each option is
held against none, one pair at a time on each GPU, in two fresh processes that find theirs compiled
and take turns, one of them idle: a process keeps the algorithm that cuDNN chose for a convolution
first, and what it compiled for one model may serve another. "nothing" is the same compiled twice:
what it gains is noise, as is what "cudnn_benchmark_twice" does. One JSON line a result: the ratio
of the steps' speed with its 95% interval, the seconds of the build, of both first steps with what
it left, and how many graphs these found in no cache. What no time is left for is said to have
failed, as efficientnet_v2_s, which takes longer to build than all others together have.
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
import torch._inductor.compile_fx  # as a process waits for its turn
from torch import cuda, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from advisor.cache.config import Config
from advisor.cache.task import Task
from advisor.tuners import host, known_wrong, target
from advisor.tuners.act.advice import Advice
from advisor.tuners.blocks import repeated
from advisor.tuners.decide.race import paired
from advisor.tuners.measure import made_up
from advisor.tuners.measure.first_step import empty_caches
from advisor.tuners.measure.made_up import Feed
from advisor.tuners.measure.workload import Workload

ROUNDS, TURN_S = 12, 0.4
CORES = 4
"""For each process that builds."""
BUILDS = 0.55
"""Of the time, at most."""
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LATE = "no time was left"
CONVOLVES, ATTENDS = "convolves", "attends"
BF16 = Config(precision="bf16", step_graph=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained, and as what is best advised for it beside its compilation.

    Attributes:
        given: of a Task.
        kind: CONVOLVES or ATTENDS.
        build_s: a guess.
        classes: of the labels, 0 where there are none. A workload that has to make its targets runs
            the model to do so, and cuDNN would keep what it chose then.
    """

    given: dict[str, Any]
    kind: str
    build_s: float
    classes: int = 0
    config: Config = BF16

    def feed(self, task: Task) -> Feed:
        """What the steps are fed with."""
        if not self.classes:
            return Feed(batch=task.batch, seed=0)
        images = made_up.make_input((task.batch, *task.sample), task.dtype, task.vocab)
        labels = torch.randint(0, self.classes, (task.batch,))
        return Feed(batch=task.batch, seed=0, given=(images, labels))


def _of_images(name: str, *shape: int, build_s: float, kind: str = CONVOLVES) -> Model:
    given = {"target": f"torchvision:{name}", "shapes": (shape,)}
    config = BF16.replace(channels_last=True) if kind == CONVOLVES else BF16
    return Model(given=given, kind=kind, build_s=build_s, classes=1000, config=config)


MODELS: dict[str, Model] = {
    "resnet50": _of_images("resnet50", 64, 3, 224, 224, build_s=30),
    "vit_b_16": _of_images("vit_b_16", 64, 3, 224, 224, build_s=30, kind=ATTENDS),
    "gpt2": Model(
        given={
            "target": f"{EXAMPLES / 'gpt2.py'}:GPT2",
            "shapes": ((8, 1024),),
            "dtype": "int64",
            "vocab": 50304,
        },
        kind=ATTENDS,
        build_s=30,
    ),
    "mobilenet_v3_large": _of_images("mobilenet_v3_large", 64, 3, 224, 224, build_s=35),
    "efficientnet_v2_s": _of_images("efficientnet_v2_s", 32, 3, 300, 300, build_s=70),
    "mnist": Model(
        given={"target": f"{EXAMPLES / 'mnist.py'}:Net", "shapes": ((128, 1, 28, 28),)},
        kind=CONVOLVES,
        build_s=10,
        classes=10,
        config=Config(precision="tf32", step_graph=True),
    ),
}

Setting = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is set while a model is compiled and its step recorded.

    Attributes:
        inductor: options of torch.compile.
        blocks: only the blocks that repeat are compiled.
        during: sets what is no option of Inductor's.
        against: what is set in the same way for the one without it.
        kinds: of models that it is tried with.
        searches: it changes no code; kernels are timed at its first steps, which none may disturb.
    """

    inductor: Mapping[str, Any] = field(default_factory=dict)
    blocks: bool = False
    during: Setting = contextlib.nullcontext
    against: Setting = contextlib.nullcontext
    kinds: tuple[str, ...] = (CONVOLVES, ATTENDS)
    searches: bool = False

    @property
    def unknown(self) -> str:
        """The options that this torch does not have."""
        return ", ".join(sorted(set(self.inductor) - set(torch._inductor.list_options())))


@contextlib.contextmanager
def searching(limit: int) -> Iterator[None]:
    """cudnn.benchmark, with so many algorithms tried; 0 for all."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, limit
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


def cudnn_first() -> contextlib.AbstractContextManager[Any]:
    order = (
        *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
        *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    )
    return sdpa_kernel(list(order), set_priority=True)


OPTIONS = {
    "nothing": Option(),
    "combo_kernels": Option(inductor={"combo_kernels": True}),
    "sdpa_cudnn_first": Option(during=cudnn_first, kinds=(ATTENDS,)),
    "coordinate_descent_tuning": Option(inductor={"coordinate_descent_tuning": True}),
    "max_autotune_gemm": Option(
        inductor={"max_autotune_gemm": True, "max_autotune_conv_backends": "ATEN"},
        kinds=(ATTENDS,),
    ),
    "cudnn_benchmark": Option(during=lambda: searching(10), kinds=(CONVOLVES,), searches=True),
    "cudnn_benchmark_twice": Option(
        during=lambda: searching(10),
        against=lambda: searching(10),
        kinds=(CONVOLVES,),
        searches=True,
    ),
    "cudnn_benchmark_limit_0": Option(
        during=lambda: searching(0),
        against=lambda: searching(10),
        kinds=(CONVOLVES,),
        searches=True,
    ),
    "mix_order_reduction": Option(inductor={"triton.mix_order_reduction": True}, kinds=(ATTENDS,)),
    "blocks": Option(blocks=True, kinds=(ATTENDS,)),
}
"""In the order in which they are measured. What they are held against is as advised: without mixed
orders, where they are known to be wrong."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model with one option, or as it is held against that option."""

    model: str
    option: str
    plain: bool = False

    @property
    def set(self) -> Option:
        option = OPTIONS[self.option]
        return Option(during=option.against) if self.plain else option

    @property
    def code(self) -> str:
        """What tells apart what is compiled."""
        alike = self.plain or self.set.searches
        return f"{self.model}-{'' if alike else self.option}"

    @property
    def turn(self) -> tuple[int, float]:
        """What all else is held against is built first, then what is measured first; of each the
        longest first."""
        last = 0 if self.set == Option() else 1 + list(OPTIONS).index(self.option)
        return last, -MODELS[self.model].build_s


class Step:
    """The step of a job, in a process that has nothing else to do."""

    def __init__(self, job: Job, device: str) -> None:
        self._job, self._device = job, device

    def start(self) -> dict[str, float]:
        """The first steps: seconds until replays, and graphs that were found in no cache."""
        model, option = MODELS[self._job.model], self._job.set
        task = Task(**model.given)
        loaded = target.load(target.parse(task.target), task.model_args)
        plainly = loaded.factory

        def factory() -> nn.Module:
            made = plainly()
            for part in repeated(made) if option.blocks else [made]:
                part.compile(options={**known_wrong.avoided(), **option.inductor})
            return made

        loaded = dataclasses.replace(loaded, factory=factory)
        begun = time.perf_counter()
        with option.during():
            advice = Advice(model.config, device=self._device, batch_size=task.batch)
            self._workload = Workload(loaded, task, advice, model.feed(task))
            self._workload.start()
            self._synchronize()
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "compiled": counters["inductor"]["fxgraph_cache_miss"]}

    def settle(self) -> dict[str, float]:
        """One turn that does not count, after which turns have their length."""
        self._steps = 10
        self._steps = max(1, round(TURN_S * self._rate()))
        return self.turn()

    def turn(self) -> dict[str, float]:
        return {"rate": self._rate()}

    def _rate(self) -> float:
        """Steps/s."""
        begun = time.perf_counter()
        for _ in range(self._steps):
            self._workload.step()
        self._synchronize()
        return self._steps / (time.perf_counter() - begun)

    def _synchronize(self) -> None:
        if self._device != "cpu":
            cuda.synchronize()


def answer(step: Step) -> None:
    """Do what is asked for, a word a line; nothing else comes to the output."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for word in sys.stdin:
        found = {"start": step.start, "settle": step.settle, "turn": step.turn}[word.strip()]()
        print(json.dumps(found), file=output, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a child works: `folder` takes caches, `threads` compile."""

    device: str
    gpu: int
    folder: str
    threads: int

    @property
    def environment(self) -> dict[str, str]:
        return {
            "CUDA_VISIBLE_DEVICES": str(self.gpu),
            "TORCHINDUCTOR_COMPILE_THREADS": str(self.threads),
        }


class Ended(Exception):
    """Why a process is no more."""


class Child:
    """A Step in a process of its own, which imports at once and is ended at a deadline."""

    def __init__(self, job: Job, place: Place, until: float) -> None:
        written, self._told = tempfile.mkstemp(dir=place.folder, text=True)
        self._late = False
        words = ["--device", place.device, "--child", json.dumps(dataclasses.astuple(job))]
        with os.fdopen(written, "w") as told:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *words],
                env=os.environ | place.environment | empty_caches(f"{place.folder}/{job.code}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
                start_new_session=True,
            )
        self._alarm = threading.Timer(max(0.0, until - time.monotonic()), self._end_late)
        self._alarm.start()

    def say(self, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `hear` says why
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()

    def hear(self) -> dict[str, float]:
        """
        Raises:
            Ended: it failed, or no time was left.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Ended(self._why())
        found: dict[str, float] = json.loads(line)
        return found

    def ask(self, word: str) -> dict[str, float]:
        self.say(word)
        return self.hear()

    def end(self) -> None:
        self._alarm.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _end_late(self) -> None:
        self._late = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _why(self) -> str:
        if self._late:
            return LATE
        self._process.wait()
        last = Path(self._told).read_text().strip().splitlines()[-1:]
        return next(iter(last), f"exit code {self._process.returncode}")[:300]


def compare(plain: Child, other: Child, *, searches: bool) -> dict[str, Any]:
    """One against the other, in turn.

    Raises:
        Ended: one of them is.
    """
    sides = (plain, other)
    if searches:
        firsts = [side.ask("start") for side in sides]
    else:
        for side in sides:
            side.say("start")
        firsts = [side.hear() for side in sides]
    for side in sides:
        side.ask("settle")
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS):
        for at in (0, 1) if turn % 2 else (1, 0):
            rates[at].append(sides[at].ask("turn")["rate"])
    found = paired(rates[1], rates[0])
    return {
        "ratio": round(found.mean, 4),
        "low": round(found.low, 4),
        "high": round(found.high, 4),
        "step_ms": round(1000 / max(rates[0]), 3),
        "first_step_s": round(firsts[1]["seconds"], 1),
        "first_step_without_s": round(firsts[0]["seconds"], 1),
        "compiled_anew": sum(first["compiled"] for first in firsts),
    }


def at_once(count: int, work: Callable[[int], None]) -> None:
    """In threads, each with its number."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Comparison:
    """Options of models on a machine, in the time there is."""

    def __init__(self, given: argparse.Namespace, folder: str) -> None:
        self._given, self._folder = given, folder
        begun = time.monotonic()
        self._builds_until = begun + BUILDS * given.seconds
        self._until = begun + given.seconds
        self._gpus = cuda.device_count() if given.device != "cpu" else 1
        self._builders = max(self._gpus, host.cores() // CORES)
        self._jobs = [
            Job(model, option)
            for option in given.options.split(",")
            for model in given.models.split(",")
            if MODELS[model].kind in OPTIONS[option].kinds
        ]
        self._built: dict[str, float] = {}
        self._failed: dict[str, str] = {}
        self._telling = threading.Lock()

    def _child(self, job: Job, gpu: int, until: float) -> Child:
        # Twice as many as there are cores for: they seldom all compile kernels at a time.
        threads = max(1, 2 * host.cores() // self._builders)
        place = Place(device=self._given.device, gpu=gpu, folder=self._folder, threads=threads)
        return Child(job, place, until)

    def build(self) -> None:
        """Compile all that will be measured."""
        known = [job for job in self._jobs if not job.set.unknown]
        wanted = {job.code: job for one in known[::-1] for job in (one, _plain(one))}
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in sorted(wanted.values(), key=lambda job: job.turn):
            waiting.put(job)

        def work(number: int) -> None:
            with contextlib.suppress(queue.Empty):
                while time.monotonic() < self._builds_until:
                    self._build(waiting.get_nowait(), number % self._gpus)

        at_once(self._builders, work)

    def _build(self, job: Job, gpu: int) -> None:
        child = self._child(job, gpu, self._builds_until)
        try:
            self._built[job.code] = child.ask("start")["seconds"]
        except Ended as exc:
            self._failed[job.code] = str(exc)
        finally:
            child.end()

    def _why_not(self, job: Job) -> str:
        """Why one cannot be measured; '' where it can."""
        if unknown := job.set.unknown:
            return f"unknown to torch {torch.__version__}: {unknown}"
        for part in (_plain(job), job):
            if part.code not in self._built:
                return f"{part.code} was not built: {self._failed.get(part.code, LATE)}"
        return ""

    def measure(self) -> None:
        """Hold each option against none, a pair at a time on each GPU, the next at its imports."""
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in self._jobs:
            if failed := self._why_not(job):
                self._tell(job, {"failed": failed})
            else:
                waiting.put(job)

        def work(gpu: int) -> None:
            with contextlib.ExitStack() as stack:

                def begun() -> tuple[Job, Child, Child] | None:
                    with contextlib.suppress(queue.Empty):
                        job = waiting.get_nowait()
                        pair = [self._child(one, gpu, self._until) for one in (_plain(job), job)]
                        for child in pair:
                            stack.callback(child.end)
                        return job, pair[0], pair[1]
                    return None

                now = begun()
                while now is not None:
                    then = begun()
                    self._measure(*now)
                    now = then

        at_once(self._gpus, work)

    def _measure(self, job: Job, plain: Child, other: Child) -> None:
        try:
            found = compare(plain, other, searches=job.set.searches)
        except Ended as exc:
            found = {"failed": str(exc)}
        finally:
            plain.end()
            other.end()
        self._tell(job, found)

    def _tell(self, job: Job, found: dict[str, Any]) -> None:
        """Print a result, and keep it."""
        line = {"model": job.model, "option": job.option, "torch": torch.__version__, **found}
        if job.code in self._built:
            line["build_s"] = round(self._built[job.code], 1)
        with self._telling:
            print(json.dumps(line), flush=True)
            results.append("options_gain", line, self._given.results)


def _plain(job: Job) -> Job:
    return dataclasses.replace(job, plain=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--options", default=",".join(OPTIONS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=290.0)
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        answer(Step(Job(*given.child), given.device))
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        comparison = Comparison(given, folder)
        comparison.build()
        comparison.measure()


if __name__ == "__main__":
    main()
