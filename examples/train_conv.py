"""Trains conv.py on random images with the advice of `advisor tune`.

advisor tune examples/conv.py --shape 64x3x256x256
python examples/train_conv.py
"""

import argparse
import time
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import advisor
from conv import Net

SAMPLE = (3, 256, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="at least 2; the first is not timed")
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    if args.steps < 2 or args.batch < 1:
        parser.error("--steps must be at least 2 and --batch at least 1")

    target = f"{Path(__file__).with_name('conv.py')}:Net"
    advice = advisor.apply(target, shape=(args.batch, *SAMPLE))
    print(f"advice: {advice.status} ({advice.reason})")
    torch.manual_seed(0)

    model = advice.prepare(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **advice.optimizer)
    dataset = TensorDataset(torch.randn(args.batch, *SAMPLE))
    sampler = RandomSampler(dataset, replacement=True, num_samples=args.steps * args.batch)
    loader = DataLoader(dataset, sampler=sampler, **advice.loader)
    # Made only once: loading 16 MiB per sample would take longer than the convolution.
    expected = advice.place(torch.randn(args.batch, 64, *SAMPLE[1:]))

    started = 0.0
    for step, (x,) in enumerate(advice.batches(loader)):
        with advice.autocast():
            loss = mse_loss(model(x), expected)
        advice.step(loss, optimizer)
        if step == 0:
            loss.item()  # waits for the device
            started = time.perf_counter()
    final = loss.item()
    seconds = time.perf_counter() - started

    print(f"{(args.steps - 1) * args.batch / seconds:.1f} samples/s, loss {final:.4f}")


if __name__ == "__main__":
    main()
