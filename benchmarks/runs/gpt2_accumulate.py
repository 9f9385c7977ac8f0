"""GPT-2 small without a framework: gradients of four batches are accumulated and clipped.

python benchmarks/runs/gpt2_accumulate.py
"""

import itertools
import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from job import Speed, options

from gpt2 import GPT2, VOCABULARY

ACCUMULATED, WARM_UP, DECAY = 4, 100, 10_000


class Texts(Dataset):
    """Parts of one long random text: tokens and the tokens that follow them."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.text = torch.randint(VOCABULARY, (1_000_000,))

    def __len__(self) -> int:
        return len(self.text) - self.length

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        part = self.text[start : start + self.length + 1]
        return part[:-1], part[1:]


def lr_factor(step: int) -> float:
    """Returns the factor of the learning rate: linear warm-up, then half a cosine to 0.1."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    progress = min(1.0, (step - WARM_UP) / (DECAY - WARM_UP))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def main() -> None:
    args = options(__doc__, batch_size=8, size=1024)
    hand = args.by_hand
    hand.set_flags()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    loader = DataLoader(
        Texts(args.size),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
    )
    model = hand.prepare(GPT2().to(device))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=hand.fused or None
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)

    if hand.graphs:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    speed = Speed(args.steps, ACCUMULATED * args.batch_size)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    model.train()
    while True:
        total = torch.zeros((), device=device)
        for tokens, following in itertools.islice(batches, ACCUMULATED):
            tokens = tokens.to(device, non_blocking=True)
            following = following.to(device, non_blocking=True)
            with hand.autocast(device):
                logits = model(tokens)
                loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
            (loss / ACCUMULATED).backward()
            total += loss.detach() / ACCUMULATED
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=not hand.graphs)
        if speed.step(total):
            return


if __name__ == "__main__":
    main()
