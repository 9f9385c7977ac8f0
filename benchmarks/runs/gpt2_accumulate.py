"""GPT-2 small without a framework: gradients of four batches gathered, clipped, then stepped.

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

GATHERED, WARM_UP, DECAY = 4, 100, 10_000


class Texts(Dataset):
    """Stretches of one long made-up text: tokens and the ones that follow them."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.text = torch.randint(VOCABULARY, (1_000_000,))

    def __len__(self) -> int:
        return len(self.text) - self.length

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        stretch = self.text[start : start + self.length + 1]
        return stretch[:-1], stretch[1:]


def rate(step: int) -> float:
    """The learning rate's factor: a linear warm-up, then half a cosine down to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    along = min(1.0, (step - WARM_UP) / (DECAY - WARM_UP))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * along))


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
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    if hand.graphs:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    speed = Speed(args.steps, GATHERED * args.batch_size)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    model.train()
    while True:
        total = torch.zeros((), device=device)
        for tokens, following in itertools.islice(batches, GATHERED):
            tokens = tokens.to(device, non_blocking=True)
            following = following.to(device, non_blocking=True)
            with hand.autocast(device):
                logits = model(tokens)
                loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
            (loss / GATHERED).backward()
            total += loss.detach() / GATHERED
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=not hand.graphs)
        if speed.step(total):
            return


if __name__ == "__main__":
    main()
