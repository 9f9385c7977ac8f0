"""One storage of each tensor for each memory format that it was ever laid out in: a CUDA graph
reads weights where they were when it was recorded, and is recorded again if they move."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

Stride = tuple[int, ...]


class Storages:
    """Keeps storages by whatever names the tensors."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, dict[Stride, Tensor]] = {}

    def laid_out(self, name: Hashable, tensor: Tensor, stride: Stride) -> Tensor:
        """The values of a tensor in the storage that is kept for a stride.

        What the tensor has now is kept for its own stride: the script may have replaced it.
        """
        kept = self._kept.setdefault(name, {})
        kept[tensor.stride()] = tensor
        found = kept.get(stride)
        same = (tensor.shape, tensor.dtype, tensor.device)
        if found is None or (found.shape, found.dtype, found.device) != same:
            found = kept[stride] = strided(tensor, stride)
        elif found is not tensor:
            found.copy_(tensor)
        return found


def strided(tensor: Tensor, stride: Stride) -> Tensor:
    """The same values with another memory format."""
    if tensor.stride() == stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)
