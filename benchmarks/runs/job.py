"""Shared by the jobs in this folder: options, synthetic data, and printing of samples/s.

The jobs are ordinary training scripts in the style of their framework, without calls to advisor.
`--by-hand bf16,channels_last,reduce-overhead` makes a job apply these settings itself, to compare
them with advice.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

WORDS = ("bf16", "tf32", "cudnn_benchmark", "channels_last", "fused")
MODES = ("default", "reduce-overhead", "max-autotune", "cudagraphs")


@dataclass(frozen=True)
class Hand:
    """Settings that a job applies itself; `compiled` is a mode, or '' for no compilation."""

    bf16: bool = False
    tf32: bool = False
    cudnn_benchmark: bool = False
    channels_last: bool = False
    fused: bool = False
    compiled: str = ""

    @classmethod
    def parse(cls, text: str) -> Hand:
        words = {word for word in text.split(",") if word}
        if unknown := words - {*WORDS, *MODES}:
            raise argparse.ArgumentTypeError(f"{unknown}: expected some of {WORDS}, one of {MODES}")
        compiled = "".join(words & {*MODES})
        return cls(compiled=compiled, **{word: word in words for word in WORDS})

    @property
    def graphs(self) -> bool:
        """Whether CUDA graphs are used; their gradients must be accumulated in other memory."""
        return self.compiled not in ("", "default")

    def set_flags(self) -> None:
        """Sets TF32 for fp32 matrix products, and cuDNN's benchmark mode."""
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = self.cudnn_benchmark

    def prepare(self, module: nn.Module) -> nn.Module:
        """Converts the layout of a module's weights and compiles its calls."""
        if self.channels_last:
            module.to(memory_format=torch.channels_last)
        if self.compiled == "cudagraphs":
            module.compile(backend="cudagraphs")
        elif self.compiled:
            module.compile(mode=self.compiled)
        return module

    def to_layout(self, pictures: Tensor) -> Tensor:
        if not self.channels_last:
            return pictures
        return pictures.contiguous(memory_format=torch.channels_last)

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Returns a bf16 autocast if it is set, else a context that does nothing."""
        on = self.bf16
        return torch.autocast(device.type, torch.bfloat16) if on else contextlib.nullcontext()


def options(
    description: str, *, batch_size: int, size: int | None = None, root: bool = False
) -> argparse.Namespace:
    """Parses the command line; the arguments are the job's defaults. A job with `root` reads files,
    with torch's default loader unless workers are given."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="optimizer steps, at least 2")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="samples per GPU")
    if size is not None:
        parser.add_argument("--size", type=int, default=size, help="picture side or text length")
    if root:
        parser.add_argument("--root", required=True, metavar="FOLDER", help="folder of JPEG files")
    workers = 0 if root else 8
    parser.add_argument("--workers", type=int, default=workers, help="data loader workers")
    parser.add_argument(
        "--by-hand", type=Hand.parse, default=Hand(), metavar="WORDS", help="settings for the job"
    )
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps must be at least 2, not {args.steps}")
    return args


class Pictures(Dataset):
    """A dataset of ImageNet's size that repeats 512 random 8-bit images: nothing to decode."""

    def __init__(self, size: int, classes: int = 1000) -> None:
        self.pictures = torch.randint(256, (512, 3, size, size), dtype=torch.uint8)
        self.labels = torch.randint(classes, (512,))

    def __len__(self) -> int:
        return 1_281_167

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pictures[index % 512], self.labels[index % 512]


def normalized(pictures: Tensor) -> Tensor:
    """Converts bytes to floats from -1 to 1."""
    return pictures.float().div_(127.5).sub_(1)


class Speed:
    """Prints the loss every 50 steps and, at the end, the samples/s of the second half."""

    def __init__(self, steps: int, samples_per_step: int) -> None:
        self.steps = steps
        self.samples_per_step = samples_per_step * int(os.environ.get("WORLD_SIZE", "1"))
        self.prints = os.environ.get("RANK", "0") == "0"
        self.done = 0
        self.started = 0.0

    def step(self, loss: Tensor | None = None) -> bool:
        """Counts a step. Returns whether it was the last one."""
        self.done += 1
        if loss is not None and self.done % 50 == 0:
            self._print(f"step {self.done}: loss {loss.item():.4f}")
        if self.done == self.steps // 2:
            self.started = self._now()
        if self.done == self.steps:
            timed = self.steps - self.steps // 2
            rate = timed * self.samples_per_step / (self._now() - self.started)
            self._print(f"{rate:.1f} samples/s over the last {timed} steps")
        return self.done >= self.steps

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _print(self, line: str) -> None:
        if self.prints:
            print(line, flush=True)
