"""Measures what drawing eager's random numbers costs compiled code, and how close to eager it is.

Each process compiles one model, in bf16 with mode reduce-overhead, and writes one JSON line: the
milliseconds of a step in each block of 20, and how far loss and gradients are from eager's (the
gradients by relative norm). Start both values of `same` together: they take turns on the GPU.

    for same in 0 1; do python benchmarks/random_numbers.py out.jsonl gpt2 $same & done; wait
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

DEVICE, BLOCKS, STEPS = "cuda", 12, 20
WORDS = 30000


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(WORDS, 512), nn.Linear(512, WORDS)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.last(self.layers(self.embedding(tokens)))
        return logits


def encoder() -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.randint(WORDS, (32, 256))
    return Encoder(), tokens, tokens


def gpt2() -> tuple[nn.Module, Tensor, Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False)
    tokens = torch.randint(config.vocab_size, (8, 1024))
    return GPT2LMHeadModel(config), tokens, tokens


def efficientnet() -> tuple[nn.Module, Tensor, Tensor]:
    import torchvision

    model = torchvision.models.efficientnet_v2_s()
    return model, torch.randn(32, 3, 300, 300), torch.randint(1000, (32,))


MODELS = {"encoder": encoder, "gpt2": gpt2, "efficientnet_v2_s": efficientnet}


def loss_of(call: Callable[[Tensor], Any], x: Tensor, y: Tensor) -> Tensor:
    torch.compiler.cudagraph_mark_step_begin()
    with torch.autocast(DEVICE, torch.bfloat16):
        output = call(x)
        logits = getattr(output, "logits", output)
        return cross_entropy(logits.float().flatten(0, -2), y.flatten())


def gradients(
    model: nn.Module, call: Callable[[Tensor], Any], x: Tensor, y: Tensor
) -> tuple[float, list[Tensor]]:
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    loss = loss_of(call, x, y)
    loss.backward()
    values = [one.grad.double() for one in model.parameters() if one.grad is not None]
    return float(loss.detach()), values


def measure(name: str, same: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    model, x, y = MODELS[name]()
    images = x.dim() == 4
    model = model.to(DEVICE, memory_format=torch.channels_last if images else None)
    x, y = x.to(DEVICE, memory_format=torch.channels_last if images else None), y.to(DEVICE)
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    loss, expected = gradients(model, model, x, y)
    call = torch.compile(model, options={"triton.cudagraphs": True, "fallback_random": same})
    for _ in range(3):
        gradients(model, call, x, y)
    model.load_state_dict(initial)
    compiled_loss, compiled = gradients(model, call, x, y)
    errors = [
        float((one - other).norm() / other.norm().clamp(min=1e-12))
        for one, other in zip(compiled, expected, strict=True)
    ]
    return {
        "model": name,
        "mode": "reduce-overhead",
        "precision": "bf16",
        "same_draws": same,
        "ms": [round(1e3 * one, 3) for one in timed(model, call, x, y)],
        "loss_off": compiled_loss - loss,
        "gradients_off": {"median": statistics.median(errors), "most": max(errors)},
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def timed(model: nn.Module, call: Callable[[Tensor], Any], x: Tensor, y: Tensor) -> list[float]:
    """Returns the seconds of a step in each block, in ascending order."""
    optimizer, seconds = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), []

    def step() -> None:
        loss_of(call, x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    with Path("/tmp/random_numbers.lock").open("w") as lock:
        for _ in range(BLOCKS):
            fcntl.flock(lock, fcntl.LOCK_EX)
            step()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - began) / STEPS)
            fcntl.flock(lock, fcntl.LOCK_UN)
            time.sleep(0.2)  # lets the other process lock the GPU
    return sorted(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("same", type=int, choices=(0, 1), help="1: draw eager's random numbers")
    args = parser.parse_args()
    row = measure(args.model, bool(args.same))
    with args.out.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
