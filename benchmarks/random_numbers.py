"""What it costs compiled code to draw eager's random numbers, and how near to eager it then is.

Each model is compiled by itself, in bf16 with mode reduce-overhead. One JSON line: milliseconds of
each block of 20 training steps, and how far the first loss and gradients are from eager's, by
norms. Start both values of `same` side by side: they take turns at the GPU.

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
        found: Tensor = self.last(self.layers(self.embedding(tokens)))
        return found


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
        found = call(x)
        found = getattr(found, "logits", found)
        return cross_entropy(found.float().flatten(0, -2), y.flatten())


def gradients(
    model: nn.Module, call: Callable[[Tensor], Any], x: Tensor, y: Tensor
) -> tuple[float, list[Tensor]]:
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    loss = loss_of(call, x, y)
    loss.backward()
    found = [one.grad.double() for one in model.parameters() if one.grad is not None]
    return float(loss.detach()), found


def measure(name: str, same: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    model, x, y = MODELS[name]()
    images = x.dim() == 4
    model = model.to(DEVICE, memory_format=torch.channels_last if images else None)
    x, y = x.to(DEVICE, memory_format=torch.channels_last if images else None), y.to(DEVICE)
    first = {key: value.clone() for key, value in model.state_dict().items()}
    loss, expected = gradients(model, model, x, y)
    call = torch.compile(model, options={"triton.cudagraphs": True, "fallback_random": same})
    for _ in range(3):
        gradients(model, call, x, y)
    model.load_state_dict(first)
    ours, found = gradients(model, call, x, y)
    off = [
        float((one - other).norm() / other.norm().clamp(min=1e-12))
        for one, other in zip(found, expected, strict=True)
    ]
    return {
        "model": name,
        "mode": "reduce-overhead",
        "precision": "bf16",
        "same_draws": same,
        "ms": [round(1e3 * one, 3) for one in blocks(model, call, x, y)],
        "loss_off": ours - loss,
        "gradients_off": {"median": statistics.median(off), "most": max(off)},
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def blocks(model: nn.Module, call: Callable[[Tensor], Any], x: Tensor, y: Tensor) -> list[float]:
    """Seconds of a step in each block, in ascending order."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), []

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
            found.append((time.perf_counter() - began) / STEPS)
            fcntl.flock(lock, fcntl.LOCK_UN)
            time.sleep(0.2)  # the other's turn
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("same", type=int, choices=(0, 1), help="1: draw eager's random numbers")
    given = parser.parse_args()
    row = measure(given.model, bool(given.same))
    with given.out.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
