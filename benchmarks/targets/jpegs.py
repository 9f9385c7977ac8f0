"""Reads JPEG files, and augments them as for ImageNet with torchvision's transforms v2.

advisor tune torchvision:resnet50 --shape 128x3x224x224 --data benchmarks/targets/jpegs.py \\
    --data-arg root=FOLDER
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2


class Jpegs(Dataset[tuple[Tensor, int]]):
    """Normalized float32 images, cropped to `crop` pixels and flipped at random. Every file is used
    `times` times in an epoch."""

    def __init__(self, root: str, crop: int, times: int) -> None:
        self.files = sorted(map(str, Path(root).glob("*.jpg")))
        self.times = times
        self.transform: Any = v2.Compose(
            [
                v2.RandomResizedCrop(crop, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )

    def __len__(self) -> int:
        return len(self.files) * self.times

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        data = read_file(self.files[index % len(self.files)])
        return self.transform(decode_jpeg(data, mode=ImageReadMode.RGB)), index % 1000


def make_dataset(root: str, crop: int = 224, times: int = 500) -> Jpegs:
    return Jpegs(root, crop, times)
