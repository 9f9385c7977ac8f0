"""What the jobs in this folder share: their options, made-up data, and their own samples/s.

The jobs are ordinary training scripts, each as its framework's users write it, and know nothing of
advisor. With `--by-hand bf16,channels_last,reduce-overhead` the same job has these written into it:
what advice is to be compared with.
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
    """What is written into a job by hand; `compiled` by this mode, or '' for not at all."""

    bf16: bool = False
    tf32: bool = False
    cudnn_benchmark: bool = False
    channels_last: bool = False
    fused: bool = False
    compiled: str = ""

    @classmethod
    def of(cls, text: str) -> Hand:
        words = {word for word in text.split(",") if word}
        if unknown := words - {*WORDS, *MODES}:
            raise argparse.ArgumentTypeError(f"{unknown}: expected some of {WORDS}, one of {MODES}")
        compiled = "".join(words & {*MODES})
        return cls(compiled=compiled, **{word: word in words for word in WORDS})

    @property
    def graphs(self) -> bool:
        """Whether CUDA graphs are replayed, whose gradients must not be added to where they lie."""
        return self.compiled not in ("", "default")

    def set_flags(self) -> None:
        """TF32 for what stays fp32, and cuDNN's fastest convolutions for the shapes at hand."""
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = self.cudnn_benchmark

    def prepare(self, module: nn.Module) -> nn.Module:
        """Its weights laid out and its calls compiled."""
        if self.channels_last:
            module.to(memory_format=torch.channels_last)
        if self.compiled == "cudagraphs":
            module.compile(backend="cudagraphs")
        elif self.compiled:
            module.compile(mode=self.compiled)
        return module

    def laid_out(self, pictures: Tensor) -> Tensor:
        if not self.channels_last:
            return pictures
        return pictures.contiguous(memory_format=torch.channels_last)

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """bf16 around a forward pass if asked for, else nothing at all."""
        on = self.bf16
        return torch.autocast(device.type, torch.bfloat16) if on else contextlib.nullcontext()


def options(
    description: str, *, batch_size: int, size: int | None = None, root: bool = False
) -> argparse.Namespace:
    """The command line's options, over what is usual for the job. With `root` it reads files, and
    its loader is as torch has it where no workers are asked for."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="optimizer steps, at least 2")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="a GPU's, in one batch")
    if size is not None:
        parser.add_argument("--size", type=int, default=size, help="of a picture's side or a text")
    if root:
        parser.add_argument("--root", required=True, metavar="FOLDER", help="of JPEG files")
    workers = 0 if root else 8
    parser.add_argument("--workers", type=int, default=workers, help="the data loader's")
    parser.add_argument(
        "--by-hand", type=Hand.of, default=Hand(), metavar="WORDS", help="written into the job"
    )
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps must be at least 2, not {args.steps}")
    return args


class Pictures(Dataset):
    """As many as ImageNet has, drawn from few, as bytes: workers and copies, but no decoding."""

    def __init__(self, size: int, classes: int = 1000) -> None:
        self.pictures = torch.randint(256, (512, 3, size, size), dtype=torch.uint8)
        self.labels = torch.randint(classes, (512,))

    def __len__(self) -> int:
        return 1_281_167

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pictures[index % 512], self.labels[index % 512]


def normalized(pictures: Tensor) -> Tensor:
    """Bytes as floats from -1 to 1."""
    return pictures.float().div_(127.5).sub_(1)


class Speed:
    """Prints the loss every 50 steps and, when all are done, samples/s over their second half."""

    def __init__(self, steps: int, samples_per_step: int) -> None:
        self.steps = steps
        self.samples_per_step = samples_per_step * int(os.environ.get("WORLD_SIZE", "1"))
        self.speaks = os.environ.get("RANK", "0") == "0"
        self.done = 0
        self.started = 0.0

    def step(self, loss: Tensor | None = None) -> bool:
        """Counts a step that was queued, and says whether it was the last."""
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
        if self.speaks:
            print(line, flush=True)
