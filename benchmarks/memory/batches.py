"""Holds the table of `advisor fit --batch free` against runs of the same script at these batches.

    python batches.py --check --limit 24 --batch-size 8 > batches.jsonl

Trains a transformer with a loss outside of the model. `--check` has advisor tune this script
without torch.compile, then runs it with `advisor run` at each batch of the table, with the steps of
accumulation that the table names. It prints one line of JSON for each, with the predicted and the
measured peak and samples/s. The batch that the table calls the largest must run, and a sixteenth
more must run out of memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch
from torch import nn

WARM, TIMED, GIB = 40, 20, 2**30  # the advice is in force after some steps


class Net(nn.Module):
    def __init__(self, layers: int, width: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, dropout=0)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def train(args: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.limit and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(args.limit * GIB / total)
    net = Net(args.layers, args.width, args.vocab).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    began = 0.0
    for step in range(args.steps or 10**9):
        if step == WARM:
            torch.cuda.synchronize() if device.type == "cuda" else None
            began = time.perf_counter()
        optimizer.zero_grad()
        for _ in range(args.accumulate):
            tokens = torch.randint(args.vocab, (args.batch_size, args.length), device=device)
            loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
            (loss / args.accumulate).backward()
        optimizer.step()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    torch.cuda.synchronize() if device.type == "cuda" else None
    rate = TIMED * args.accumulate * args.batch_size / (time.perf_counter() - began)
    print(json.dumps({"peak_bytes": peak, "samples_per_s": rate}))


def check(args: argparse.Namespace, script: list[str]) -> None:
    advisor = [sys.executable, "-m", "advisor"]
    limit = ["--memory", f"{args.limit}GiB"] if args.limit else []
    fit = ["fit", "--batch", "free", "--no-compile", "--force", "--json", *limit]
    found = subprocess.run([*advisor, *fit, "--", *script], stdout=subprocess.PIPE, check=True)
    table = json.loads(found.stdout)["batches"]
    more = [{"batch": x["batch"] * 17 // 16} for x in table if x["largest"]]
    for row in [*table, *more]:
        steps = ["--steps", str(WARM + TIMED), "--accumulate", str(row.get("accumulation") or 1)]
        command = [*script, *steps, "--batch-size", str(row["batch"])]
        done = subprocess.run([*advisor, "run", "--", *command], capture_output=True, text=True)
        measured = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else None
        said = done.stderr.splitlines()[-1:]
        print(json.dumps({"table": row, "measured": measured, "said": said}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    for name, value in {
        "batch-size": 8, "layers": 24, "width": 1024, "vocab": 32000, "length": 1024,
        "steps": 0, "limit": 0, "accumulate": 1,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.check:
        given = [word for word in sys.argv[1:] if word != "--check"]
        check(args, [sys.executable, __file__, *given])
    else:
        train(args)


if __name__ == "__main__":
    main()
