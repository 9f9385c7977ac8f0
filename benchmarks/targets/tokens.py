"""Tokenised text of a file, as a language model reads it: samples of so many tokens and a class.

advisor tune benchmarks/targets/encoder.py --shape 32x128 --dtype int64 --vocab 30000 \\
    --data benchmarks/targets/tokens.py --data-arg file=FILE
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Tokens(Dataset[tuple[Tensor, int]]):
    """Stretches of a file of 16-bit tokens, which is mapped, from anywhere in it."""

    def __init__(self, file: str, length: int) -> None:
        self.tokens = np.memmap(file, dtype=np.uint16, mode="r")
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) - self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        stretch = self.tokens[index : index + self.length].astype(np.int64)
        return torch.from_numpy(stretch), index % 2


def make_dataset(file: str, length: int = 128) -> Tokens:
    return Tokens(file, length)
