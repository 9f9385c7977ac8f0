"""Reads samples from a file of tokens: a part of the text, and a class.

advisor tune benchmarks/targets/encoder.py --shape 32x128 --dtype int64 --vocab 30000 \\
    --data benchmarks/targets/tokens.py --data-arg file=FILE
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Tokens(Dataset[tuple[Tensor, int]]):
    """Parts of a memory-mapped file of 16-bit tokens, one from each position."""

    def __init__(self, file: str, length: int) -> None:
        self.tokens = np.memmap(file, dtype=np.uint16, mode="r")
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) - self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        part = self.tokens[index : index + self.length].astype(np.int64)
        return torch.from_numpy(part), index % 2


def make_dataset(file: str, length: int = 128) -> Tokens:
    return Tokens(file, length)
