"""Prints how long each part of a first compilation takes: GPT-2, bf16, reduce-overhead.

TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) python benchmarks/compile_time.py
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import GPT2Config, GPT2LMHeadModel


@contextmanager
def timed(label: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    torch.cuda.synchronize()
    print(f"{label}: {time.perf_counter() - began:.2f} s", flush=True)


def main() -> None:
    model = GPT2LMHeadModel(GPT2Config()).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 50257, (8, 512), device="cuda")

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss: torch.Tensor = model(tokens, labels=tokens).loss
        return loss

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    with timed("five eager steps"):
        for _ in range(5):
            step()
    with timed("import of torch._dynamo and torch._inductor"):
        importlib.import_module("torch._dynamo")
        importlib.import_module("torch._inductor.compile_fx")
    options = torch._inductor.list_mode_options("reduce-overhead") | {"fallback_random": True}
    model.compile(options=options)
    with timed("first forward"):
        loss = forward()
    with timed("first backward"):
        loss.backward()
    with timed("four more steps"):
        for _ in range(4):
            step()
    for label, seconds in torch._dynamo.utils.calculate_time_spent().items():
        print(f"{label}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
