"""Compares the gains that `advisor explain -- COMMAND` predicts with those of fixing it by hand.

    python benchmarks/limits.py > limits.jsonl            # on a GPU
    python benchmarks/limits.py --only transform workers  # also on a CPU

Each script has one planted limit: `.item()` after each part of a step, inputs padded to 4x, a step
bound by launches of small kernels, a slow transform, in the script's process and in a worker. Each
runs under `advisor explain`, then by itself with and without `--fixed`, in turn. Prints a line of
JSON for each: the limit and its line, the predicted gain, and the true gain, fixed over planted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

LIMITS = {
    "item": "waiting for the GPU",
    "padding": "padding",
    "launches": "an idle GPU",
    "transform": "loading",
    "workers": "loading",
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM, TURNS = 20, 3
Step = Callable[[], None]


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model.to(DEVICE)
    return model, torch.optim.SGD(model.parameters(), 1e-4)


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def item(fixed: bool) -> Iterator[None]:
    """Small and large kernels in turn; the CPU could run ahead of the GPU."""
    width = 2048 if DEVICE == "cuda" else 256
    layers = [nn.Linear(width, width) for _ in range(24)]
    model, optimizer = trained(nn.Sequential(*layers, *[nn.Linear(width, width)] * 24))
    x, total = torch.randn(width // 2, width, device=DEVICE), 0.0
    kept = torch.zeros((), device=DEVICE)
    while True:
        loss = model(x).square().mean()
        update(optimizer, loss)
        for parameter in model.parameters():
            kept += parameter.grad.norm()  # type: ignore[union-attr]
            if not fixed:
                total += kept.item()  # planted
        yield


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = 512 if DEVICE == "cuda" else 64
        self.embedding = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.layers(self.embedding(ids))
        return mixed


def padding(fixed: bool) -> Iterator[None]:
    """Rows of 96 to 160 tokens, padded to 512; fixed: sorted by length."""
    model, optimizer = trained(Encoder())
    rows, longest = (64, 512) if DEVICE == "cuda" else (4, 256)
    lengths = torch.randint(longest * 3 // 16, longest * 5 // 16 + 1, (16 * rows,))
    for size in (s for _ in range(10**6) for s in lengths.sort().values.split(rows)):
        ids = torch.randint(1, 1000, (rows, int(size.max()) if fixed else longest))
        ids[torch.arange(ids.shape[1]) >= size[:, None]] = 0
        update(optimizer, model(ids.to(DEVICE)).square().mean())  # planted
        yield


def launches(fixed: bool) -> Iterator[None]:
    """A small model; fixed: its whole step is one CUDA graph."""
    model, _ = trained(nn.Sequential(*(nn.Linear(128, 128) for _ in range(64))))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, foreach=False)
    x = torch.randn(64, 128, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    run: Step = step
    if fixed and DEVICE == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    while True:
        run()
        yield


class Items:
    def __init__(self, fixed: bool) -> None:
        self.fixed = fixed

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        item = torch.full((256,), float(index))
        if not self.fixed:
            until = time.perf_counter() + 0.002
            while time.perf_counter() < until:
                item = item.sin()  # planted
        return item


def transform(fixed: bool, workers: int = 0) -> Iterator[None]:
    model, optimizer = trained(nn.Sequential(*(nn.Linear(256, 256) for _ in range(64))))
    items: Any = Items(fixed)
    while True:
        for x in DataLoader(items, 8, num_workers=workers):
            update(optimizer, model(x.to(DEVICE)).square().mean())
            yield


SCRIPTS: dict[str, Callable[[bool], Iterator[None]]] = {
    "item": item,
    "padding": padding,
    "launches": launches,
    "transform": transform,
    "workers": lambda fixed: transform(fixed, workers=1),
}


def train(name: str, fixed: bool, seconds: float) -> None:
    """Train for `seconds` (0: without end), then print steps/s."""
    steps = SCRIPTS[name](fixed)
    for _ in range(WARM):
        next(steps)
    synchronize()
    made, began = 0, time.perf_counter()
    while not seconds or time.perf_counter() < began + seconds:
        next(steps)
        made += 1
    synchronize()
    print(made / (time.perf_counter() - began))


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--only", nargs="+", choices=LIMITS, default=[*LIMITS])
    options.add_argument("--budget", default="20s")
    options.add_argument("--seconds", type=float, default=6.0)
    options.add_argument("--train", choices=LIMITS)
    options.add_argument("--fixed", action="store_true")
    args = options.parse_args()
    if args.train:
        return train(args.train, args.fixed, args.seconds)
    for name in args.only:
        start = [sys.executable, __file__, "--train", name, "--seconds"]
        words = [sys.executable, "-m", "advisor", "explain", "--json", "--budget", args.budget]
        document = json.loads(_output([*words, "--", *start, "0"]))
        found = [one for one in document.get("limits", ()) if one["what"].startswith(LIMITS[name])]
        line = {"script": name, "device": DEVICE, "limits": document.get("limits", document)}
        rates = [
            [float(_output([*start, str(args.seconds), *fix])) for fix in ([], ["--fixed"])]
            for _ in range(TURNS)
        ]
        true = statistics.median(fixed / planted for planted, fixed in rates)
        predicted = found[0]["gain"] if found else 1.0
        line |= {"rates": rates, "predicted": predicted, "true": true, "off": predicted / true - 1}
        if found and found[0]["file"]:
            text = Path(found[0]["file"]).read_text().splitlines()
            line["at"] = text[found[0]["line"] - 1].strip()
        print(json.dumps(line), flush=True)


def _output(words: list[str]) -> str:
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False).stdout


if __name__ == "__main__":
    main()
