"""Trains a Llama-like model with made-up weights and tokens, sharded by FSDP2, in fp32.

torchrun --nproc-per-node 2 examples/train_fsdp2.py
advisor tune -- torchrun --nproc-per-node 2 examples/train_fsdp2.py --size 1b
"""

from __future__ import annotations

import argparse
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional


class Size(NamedTuple):
    layers: int
    width: int
    hidden: int
    heads: int
    groups: int  # heads of keys and values
    words: int
    context: int
    batch: int  # of one process


SIZES = {
    "tiny": Size(4, 64, 128, 4, 2, 256, 32, 4),
    "1b": Size(20, 2048, 5632, 32, 8, 32_000, 1024, 4),
}
RARE = 4
"""How much rarer later words are. If all were equally frequent, there would be nothing to learn:
gradients would be noise, which rounding to bf16 changes (benchmarks/results/ranks.md)."""


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, head, position, feature)."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.groups = size.heads, size.groups
        self.feature = size.width // size.heads
        within = self.feature * size.groups
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, within, bias=False)
        self.value = nn.Linear(size.width, within, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        query = self.split(self.query(normed), self.heads)
        key, value = (self.split(one(normed), self.groups) for one in (self.key, self.value))
        key, value = (one.repeat_interleave(self.heads // self.groups, 1) for one in (key, value))
        mixed = functional.scaled_dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.feature)).transpose(1, 2)


class Llama(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.words, size.width)
        self.layers = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        for one in self.modules():
            if isinstance(one, nn.Linear | nn.Embedding):
                nn.init.normal_(one.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--micro-batches", type=int, default=1)
    args = parser.parse_args()
    size, local = SIZES[args.size], int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # all ranks begin with the same weights
    with device:
        model = Llama(size)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    draw = torch.Generator(device).manual_seed(dist.get_rank())
    for step in range(args.steps):
        optimizer.zero_grad()
        for _ in range(args.micro_batches):
            shape = size.batch, size.context + 1
            drawn = torch.rand(shape, device=device, generator=draw)
            tokens = (size.words * drawn**RARE).long()
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / args.micro_batches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
