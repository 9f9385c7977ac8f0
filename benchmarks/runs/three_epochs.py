"""Trains epochs that end with a short batch and an evaluation: does the speed stay the same?

    advisor tune --budget 60s -- python benchmarks/runs/three_epochs.py --epochs 100
    advisor run -- python benchmarks/runs/three_epochs.py

Prints a JSON line for each epoch: the median seconds of a step with a full batch in its second
half, and the number of graphs compiled so far. Under `advisor run`, the first epoch compiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, LENGTH, WORDS = 16, 256, 8192


class LanguageModel(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.last(self.layers(self.embedding(tokens)))
        return logits


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


def graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="full batches per epoch")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LanguageModel(args.width, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples = args.steps * BATCH + BATCH // 3  # the last batch is short
    data = torch.randint(WORDS, (samples, LENGTH), device=device)
    for epoch in range(args.epochs):
        model.train()
        seconds = []
        for tokens in data.split(BATCH):
            began = time.perf_counter()
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            seconds.append(time.perf_counter() - began)
        model.eval()
        with torch.no_grad():
            eval_loss = statistics.fmean(loss_of(model, t).item() for t in data[:100].split(BATCH))
        step_s = statistics.median(seconds[len(seconds) // 2 : -1])
        line = {"epoch": epoch + 1, "step_s": step_s, "short_s": seconds[-1], "graphs": graphs()}
        print(json.dumps(line | {"loss": loss.item(), "evaluated": eval_loss}), flush=True)


if __name__ == "__main__":
    main()
