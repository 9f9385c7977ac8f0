"""A character model with gradient accumulation, averaged weights and its own torch.compile."""

import argparse
import math
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, length, width=128, heads=4, layers=4):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--backend", default="inductor", help="torch.compile's")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.randint(0, 64, (100_000,))
    text[1::2] = (text[::2] * 7 + 3) % 64  # every second character depends on the one before

    def batch():
        starts = torch.randint(0, len(text) - args.length - 1, (args.batch_size,)).tolist()
        x = torch.stack([text[s : s + args.length] for s in starts])
        y = torch.stack([text[s + 1 : s + 1 + args.length] for s in starts])
        return x.to(device), y.to(device)

    model = GPT(64, args.length).to(device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained = torch.compile(model, backend=args.backend)

    start = time.time()
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        total = 0.0
        for _ in range(args.accumulate):
            loss = trained(*batch()) / args.accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update_parameters(model)
        if step % 50 == 0:
            print(f"step {step} loss {total:.3f} {50 / (time.time() - start):.2f} steps/s")
            start = time.time()
        if step % 500 == 0:
            torch.save({"step": step, "ema": average.module.state_dict()}, f"ckpt_{step}.pt")


if __name__ == "__main__":
    main()
