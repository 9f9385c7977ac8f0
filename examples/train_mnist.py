"""Trains and evaluates mnist.py on synthetic digits with the advice of `advisor tune`.

advisor tune examples/mnist.py --shape 128x1x28x28
python examples/train_mnist.py --compare
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler

import advisor
from mnist import SAMPLE, Net, make_digits


def compare(words: list[str], turns: int = 3) -> None:
    """Trains with and without the advice, in turn, each time in a new process."""
    for _turn in range(turns):
        for name, disabled in (("without advisor", "1"), ("with its advice", "")):
            finished = subprocess.run(
                [sys.executable, __file__, *words],
                env=os.environ | {"ADVISOR_DISABLE": disabled},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            _advice, speed, accuracy = finished.stdout.splitlines()
            print(f"{name}:  {speed}, {accuracy}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="at least 2; the first is not timed")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--compare", action="store_true", help="train with and without the advice")
    args = parser.parse_args()
    if args.compare:
        compare([word for word in sys.argv[1:] if word != "--compare"])
        return
    if args.steps < 2 or args.batch < 1:
        parser.error("--steps must be at least 2 and --batch at least 1")

    target = f"{Path(__file__).with_name('mnist.py')}:Net"
    advice = advisor.apply(target, shape=(args.batch, *SAMPLE), capture=True)
    print(f"advice: {advice.status} ({advice.reason})")
    torch.manual_seed(0)

    model = advice.prepare(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **advice.optimizer)
    prototypes = torch.randn(10, *SAMPLE)
    train, test = make_digits(prototypes, 4096), make_digits(prototypes, 1024)
    sampler = RandomSampler(train, replacement=True, num_samples=args.steps * args.batch)
    train_loader = DataLoader(train, sampler=sampler, **advice.loader)
    test_loader = DataLoader(test, **advice.loader)

    def train_step(batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        with advice.autocast():
            loss = cross_entropy(model(x), y)
        advice.step(loss, optimizer)
        return loss

    model.train()
    step = advice.capture(train_step, next(iter(train_loader)))  # train_step if not captured
    started = 0.0
    for number, batch in enumerate(advice.batches(train_loader)):
        loss = step(batch)
        if number == 0:
            loss.item()  # waits for the device
            started = time.perf_counter()
    final = loss.item()
    seconds = time.perf_counter() - started
    print(f"{(args.steps - 1) * args.batch / seconds:.1f} samples/s, loss {final:.4f}")

    model.eval()
    correct = 0
    with torch.inference_mode():
        for x, y in advice.batches(test_loader):
            with advice.autocast():
                logits = model(x)
            correct += int((logits.argmax(1) == y).sum())
    print(f"accuracy {correct / len(test):.1%} on {len(test)} unseen samples")


if __name__ == "__main__":
    main()
