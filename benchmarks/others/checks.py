"""Checks on a GPU the assumptions behind the tuning of a run.

    python benchmarks/others/checks.py --part gate dcgan --results checks.jsonl

- gate: compiled GPT-2 with a short batch every 40 steps, with and without a signature gate
- dcgan: two compiled nets, several calls in a step, and extra calls of the generator
- layouts: weights that change their layout and back: are CUDA graphs recorded again?
- lstm: which ways to compile or capture an LSTM work, and their speed-up

Each part runs in its own process with a time limit. Each measurement adds a JSON line.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map
from wrapped import compiled, formatted, gated

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WEIGHTS = {"gate": 12, "dcgan": 9, "layouts": 11, "lstm": 7}
"""Relative time limits of the parts. Unused time goes to the later parts."""


@dataclass(slots=True)
class Report:
    """Adds a JSON line to the results for each measurement."""

    part: str
    results: Path
    small: bool
    limit_s: float
    started: float = field(default_factory=time.monotonic)

    def write(self, **fields: Any) -> None:
        at = round(time.monotonic() - self.started, 1)
        line = json.dumps({"part": self.part, "at_s": at, **fields})
        with self.results.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    @contextmanager
    def attempt(self, share: float, **fields: Any) -> Iterator[None]:
        """Limits a variant to a share of the part's time. Reports its error and goes on."""
        signal.signal(signal.SIGALRM, raise_timeout)
        signal.alarm(max(1, int(share * self.limit_s)))
        try:
            yield
        except Exception as error:
            self.write(**fields, error=type(error).__name__, message=str(error)[:400])
        finally:
            signal.alarm(0)
            start_over()


def raise_timeout(signum: int, frame: Any) -> None:
    raise TimeoutError("the variant took too long")


def start_over() -> None:
    torch._dynamo.reset()
    counters.clear()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@contextmanager
def append_seconds(seconds: list[float]) -> Iterator[None]:
    """Appends the seconds of the block, with the device synchronized before and after."""
    synchronize()
    begin = time.perf_counter()
    yield
    synchronize()
    seconds.append(time.perf_counter() - begin)


def timed(step: Callable[[], Any], steps: int = 1) -> float:
    """Returns the seconds of some steps."""
    seconds: list[float] = []
    with append_seconds(seconds):
        for _ in range(steps):
            step()
    return seconds[0]


def rate(step: Callable[[], Any], *, blocks: int = 5, seconds: float = 0.5) -> dict[str, Any]:
    """Measures steps per second: the median, lowest and highest of some blocks."""
    steps = max(3, int(seconds / max(1e-4, timed(step))))
    rates = [steps / timed(step, steps) for _ in range(blocks)]
    return {"steps_per_s": statistics.median(rates), "range": [min(rates), max(rates)]}


GRAPHS = {"recorded": 0, "warmed_up": 0}


def count_graphs() -> None:
    """Counts in GRAPHS how often torch.compile records a CUDA graph or warms one up."""
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    for method, key in (("record_function", "recorded"), ("run_eager", "warmed_up")):
        setattr(CUDAGraphTreeManager, method, counting(getattr(CUDAGraphTreeManager, method), key))


def counting(method: Callable[..., Any], key: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        GRAPHS[key] += 1
        return method(*args, **kwargs)

    return call


def compilations() -> dict[str, Any]:
    """Returns counts of compilations since start_over(), and of CUDA graphs since the start."""
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": {reason[:160]: count for reason, count in counters["graph_break"].items()},
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        **GRAPHS,
    }


def gate(report: Report) -> None:
    for is_gated, share in ((True, 0.4), (False, 0.55)):
        with report.attempt(share, gated=is_gated):
            gate_variant(report, is_gated)


def gate_variant(report: Report, is_gated: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"n_layer": 2, "n_embd": 64, "n_head": 2} if report.small else {}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **size)).to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    model.forward = formatted(model.forward, "bf16", "own")
    plain = model._call_impl
    fast = compiled(plain, "reduce-overhead")
    model._compiled_call_impl = gated(model, plain, fast) if is_gated else fast
    batch, length = (4, 32) if report.small else (8, 512)
    ids = torch.randint(0, 50000, (batch, length), device=DEVICE)

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    short = ids[: batch - 3].clone()
    first = [timed(lambda: step(ids)) for _ in range(4)]
    report.write(gated=is_gated, first_steps_s=first, **compilations())
    for epoch in range(5):
        full = [timed(lambda: step(ids), 10) for _ in range(1 if report.small else 4)]
        report.write(
            gated=is_gated,
            epoch=epoch,
            full_steps_per_s=[10 / seconds for seconds in full],
            short_step_s=timed(lambda: step(short)),
            loss=step(ids).item(),
            **compilations(),
        )


def dcgan(report: Report) -> None:
    variants: tuple[dict[str, Any], ...] = (
        {"mode": "reduce-overhead", "is_gated": False, "peek": "gradients"},
        {"mode": "reduce-overhead", "is_gated": True, "peek": "gradients"},
        {"mode": "reduce-overhead", "is_gated": True, "peek": "no_grad"},
        {"mode": "reduce-overhead", "is_gated": True, "peek": "no_grad", "care": "marked"},
        {"mode": "reduce-overhead", "is_gated": True, "peek": "gradients", "care": "marked"},
        {"mode": "reduce-overhead", "is_gated": True, "peek": "gradients", "care": "cloned"},
        {"mode": "reduce-overhead", "is_gated": True, "peek": "no_grad", "care": "cloned"},
        {"mode": "default", "is_gated": True, "peek": "gradients"},
        {"mode": "none", "is_gated": True, "peek": "gradients"},
    )
    for variant in variants:
        with report.attempt(0.4, **variant):
            dcgan_variant(report, **variant)


def generator(width: int) -> nn.Module:
    sizes = (width * 8, width * 4, width * 2, width)
    layers: list[nn.Module] = [nn.ConvTranspose2d(100, sizes[0], 4, 1, 0, bias=False)]
    for before, after in pairwise(sizes):
        layers += [nn.BatchNorm2d(before), nn.ReLU(True)]
        layers += [nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)]
    layers += [nn.BatchNorm2d(width), nn.ReLU(True), nn.ConvTranspose2d(width, 3, 4, 2, 1)]
    return nn.Sequential(*layers, nn.Tanh()).to(DEVICE)


def discriminator(width: int) -> nn.Module:
    sizes = (width, width * 2, width * 4, width * 8)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
    for before, after in pairwise(sizes):
        layers += [nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after)]
        layers += [nn.LeakyReLU(0.2, True)]
    layers += [nn.Conv2d(width * 8, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0)]
    return nn.Sequential(*layers).to(DEVICE)


def compile_net(net: nn.Module, mode: str, is_gated: bool, care: str) -> None:
    """Compiles a net in place. A discriminator has two signatures in a step."""
    if mode == "none":
        return
    plain = net._call_impl
    compiled_call = compiled(plain, mode)

    def cloned(*args: Any) -> Any:
        return tree_map(torch.clone, compiled_call(*args))

    fast = cloned if care == "cloned" else compiled_call
    net._compiled_call_impl = gated(net, plain, fast, signatures=2) if is_gated else fast


def dcgan_variant(report: Report, mode: str, is_gated: bool, peek: str, care: str = "") -> None:
    torch.manual_seed(0)
    iterations, look = (6, 3) if report.small else (220, 100)
    batch, width = (4, 8) if report.small else (64, 64)
    nets = discriminator(width), generator(width)
    optimizers = [torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in nets]
    for net in nets:
        compile_net(net, mode, is_gated, care)
    real, fixed = torch.randn(batch, 3, 64, 64), torch.randn(batch, 100, 1, 1)
    real, fixed = real.to(DEVICE), fixed.to(DEVICE)
    times: list[float] = []
    variant = {"mode": mode, "gated": is_gated, "peek": peek, "care": care}
    for i in range(iterations):
        try:
            if care == "marked":
                torch.compiler.cudagraph_mark_step_begin()
            with append_seconds(times):
                losses = dcgan_step(nets, optimizers, real)
            if i % look == 0:
                with torch.set_grad_enabled(peek == "gradients"):
                    looked_at = nets[1](fixed).detach().cpu().mean().item()
        except Exception as error:
            message = f"{type(error).__name__}: {str(error)[:300]}"
            report.write(**variant, raised_at=i, raised=message, **compilations())
            return
    steady = times[iterations // 2 :]
    report.write(
        **variant,
        raised=None,
        steps_per_s=len(steady) / sum(steady),
        first_steps_s=times[:4],
        slowest_steady_s=max(steady),
        losses=losses,
        looked_at=looked_at,
        **compilations(),
    )


def dcgan_step(
    nets: tuple[nn.Module, nn.Module],
    optimizers: list[torch.optim.Adam],
    real: Tensor,
) -> list[float]:
    """Trains the discriminator on real and generated images, then the generator."""
    (critic, generator_net), (critic_optimizer, generator_optimizer) = nets, optimizers
    ones, zeros = torch.ones(len(real), device=DEVICE), torch.zeros(len(real), device=DEVICE)
    critic.zero_grad()
    scores = critic(real)
    nn.functional.binary_cross_entropy(scores, ones).backward()
    real_score = scores.mean().item()
    generated = generator_net(torch.randn(len(real), 100, 1, 1, device=DEVICE))
    scores = critic(generated.detach())
    critic_loss = nn.functional.binary_cross_entropy(scores, zeros)
    critic_loss.backward()
    critic_optimizer.step()
    generator_net.zero_grad()
    scores = critic(generated)
    generator_loss = nn.functional.binary_cross_entropy(scores, ones)
    generator_loss.backward()
    generator_optimizer.step()
    return [real_score, critic_loss.item(), generator_loss.item()]


FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def layouts(report: Report) -> None:
    for keep, share in ((True, 0.6), (False, 0.35)):
        with report.attempt(share, kept=keep):
            layouts_variant(report, keep)


@dataclass(slots=True)
class Storages:
    """Switches the layout of weights and momentum. With `keep`, each layout has a fixed storage."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    keep: bool
    kept: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def switch(self, before: str, after: str) -> None:
        for index, weight in enumerate(self.model.parameters()):
            weight.grad = None
            if weight.dim() != 4:
                continue
            weight.data = self.converted(index, "weight", weight.data, before, after)
            state = self.optimizer.state[weight]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() == 4:
                    state[key] = self.converted(index, key, value, before, after)

    def converted(self, index: int, key: str, value: Tensor, before: str, after: str) -> Tensor:
        """Returns the values in the other layout."""
        if not self.keep:
            return value.clone(memory_format=FORMATS[after])
        self.kept[index, key, before] = value
        if (index, key, after) not in self.kept:
            self.kept[index, key, after] = value.clone(memory_format=FORMATS[after])
        return self.kept[index, key, after].copy_(value)


def layouts_variant(report: Report, keep: bool) -> None:
    from torchvision.models import resnet18, resnet50

    torch.manual_seed(0)
    model = (resnet18 if report.small else resnet50)(num_classes=10).to(DEVICE).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch, side = (2, 32) if report.small else (64, 224)
    images = torch.randn(batch, 3, side, side, device=DEVICE)
    inputs = {name: images.clone(memory_format=layout) for name, layout in FORMATS.items()}
    labels = torch.randint(0, 10, (batch,), device=DEVICE)
    model.forward = formatted(model.forward, "bf16", "own")
    fast = {name: compiled(model._call_impl, "reduce-overhead") for name in FORMATS}

    def step(name: str) -> None:
        nn.functional.cross_entropy(fast[name](inputs[name]), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    storages, before = Storages(model, optimizer, keep), "contiguous"
    for visit, after in enumerate(("contiguous", *(["channels_last", "contiguous"] * 3))):
        count, counts = 2 if report.small else 10, compilations()
        switch_s = [timed(partial(storages.switch, before, after)) for _ in range(before != after)]
        first = [timed(partial(step, after)) for _ in range(4)]
        seconds = timed(partial(step, after), count)
        report.write(
            kept=keep,
            visit=visit,
            layout=after,
            switch_s=switch_s,
            first_steps_s=first,
            steps_per_s=count / seconds,
            new={
                key: compilations()[key] - counts[key]
                for key in ("graphs", "recorded", "warmed_up")
            },
        )
        before = after


class Recurrent(nn.Module):
    """An LSTM and a projection of its outputs."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, num_layers=2, batch_first=True)
        self.projection = nn.Linear(hidden, features)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.projection(self.lstm(inputs)[0])
        return outputs


def lstm(report: Report) -> None:
    ways = ("none", "default", "reduce-overhead", "cudagraphs", "graphed lstm", "graphed model")
    for number_format in ("bf16", "own"):
        for way in (*ways, "reduce-overhead with allow_rnn"):
            with report.attempt(0.3, way=way, format=number_format):
                lstm_variant(report, way, number_format)


def lstm_variant(report: Report, way: str, number_format: str) -> None:
    torch.manual_seed(0)
    batch, length, features, hidden = (4, 8, 16, 32) if report.small else (64, 128, 256, 1024)
    model = Recurrent(features, hidden).to(DEVICE).train()
    inputs = torch.randn(batch, length, features, device=DEVICE)
    target = torch.randn(batch, length, features, device=DEVICE)
    inner = model.lstm if way == "graphed lstm" else model
    for module in {inner, model.projection}:
        module.forward = formatted(module.forward, number_format, "own")  # type: ignore[method-assign]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    with torch._dynamo.config.patch({"allow_rnn": True} if way.endswith("allow_rnn") else {}):
        begin = time.perf_counter()
        if way.startswith("graphed"):
            torch.cuda.make_graphed_callables(inner, (inputs,))
        elif way != "none":
            model._compiled_call_impl = compiled(model._call_impl, way.split()[0])

        def step() -> None:
            nn.functional.mse_loss(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()

        first = [timed(step) for _ in range(5)]
        built = time.perf_counter() - begin
        measured = rate(step, seconds=0.02 if report.small else 0.5)
    loss = nn.functional.mse_loss(model(inputs), target).item()
    fields = {**measured, "build_s": built, "first_steps_s": first, "loss": loss}
    report.write(way=way, format=number_format, **fields, **compilations())


PARTS: dict[str, Callable[[Report], None]] = {
    "gate": gate,
    "dcgan": dcgan,
    "layouts": layouts,
    "lstm": lstm,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--results", type=Path, default=Path("checks.jsonl"))
    parser.add_argument("--limit", type=float, default=350.0, help="seconds for all parts")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a smoke test")
    parser.add_argument("--inside", action="store_true", help="run the part in this process")
    args = parser.parse_args()
    if args.inside:
        count_graphs()
        PARTS[args.part[0]](Report(args.part[0], args.results, args.small, args.limit))
        return
    end = time.monotonic() + args.limit
    for index, part in enumerate(args.part):
        share = WEIGHTS[part] / sum(WEIGHTS[later] for later in args.part[index:])
        start(Report(part, args.results, args.small, share * (end - time.monotonic())))


def start(report: Report) -> None:
    """Runs one part in a new process, until its limit at most."""
    command = [sys.executable, __file__, "--inside", "--part", report.part]
    command += ["--limit", str(report.limit_s), "--results", str(report.results)]
    command += ["--small"] if report.small else []
    try:
        done = subprocess.run(command, timeout=report.limit_s, check=False)
        report.write(finished=done.returncode == 0, exit=done.returncode)
    except subprocess.TimeoutExpired:
        report.write(finished=False, stopped_after_s=report.limit_s)


if __name__ == "__main__":
    main()
