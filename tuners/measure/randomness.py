"""The same random numbers in every run, and the rounding of a number format as random numbers.

Two runs that draw their dropout masks differ by far more than a number format rounds: another
dtype, memory format or kernel is another mask from the same seed. So while configs are compared,
what a model draws is a hash of the place in the tensor and of the step: without a generator, hence
the same in eager, compiled and captured code, in any order and at a recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from advisor.tuners import fp8

_MODULUS = 2**31
_VALUES = _MODULUS >> 8
_FACTORS = (1103515245, 40503, 1597334677, 1103515245)


def salted(number: int, device: torch.device) -> Tensor:
    """What `uniform` hashes with: a number that names the draw, and its factors.

    The factors too are read from memory. As constants Inductor folds them into indices, which it
    takes for 32-bit numbers where the tensor is small ('Scalar ... is out of range for int32').
    """
    return torch.tensor((number, *_FACTORS), dtype=torch.int64, device=device)


def hashed(shape: Any, salt: Tensor) -> Tensor:
    """Whole numbers from 0 to _VALUES, a function of the place and of `salted(...)` alone."""
    mixed = torch.arange(math.prod(shape), device=salt.device, dtype=torch.int64)
    # Multiplications below 2**62: no overflow, which compiled code could treat another way.
    mixed = (mixed * salt[1] + salt[0] * salt[2] + 12345) % _MODULUS
    for factor in (salt[3], salt[4]):
        mixed = (mixed ^ (mixed >> 15)) * factor % _MODULUS
    mixed = mixed ^ (mixed >> 16)
    return (mixed >> 8).view(*shape)


def uniform(shape: Any, salt: Tensor) -> Tensor:
    """Numbers in (0, 1), float32, as `hashed`."""
    return (hashed(shape, salt).float() + 0.5).div(_VALUES)


def draws(step: Callable[[], None], device: torch.device) -> bool:
    """Whether a step draws random numbers of PyTorch's."""

    def states() -> list[Tensor]:
        on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]

    before = states()
    step()
    return not all(map(torch.equal, before, states()))


class SameDraws(TorchFunctionMode):
    """While active, dropout and random tensors are drawn by `uniform`, at their own rates.

    Dropout inside attention and recurrent kernels is off. What else draws (torch.multinomial,
    torch.randint, ...) goes on with PyTorch's generators.

    Attributes:
        salt: on the device; another first number is another draw, for captured code too.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.salt = salted(0, device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWN:
            return _DRAWN[func](self.salt, *args, **kwargs)
        if func in _DROPPING:
            at = _DROPPING[func]
            args = (*args[:at], 0.0, *args[at + 1 :]) if len(args) > at else args
            kwargs = kwargs | {"dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        if func in _RECURRENT:
            # Their dropout is their only float.
            args = tuple(0.0 if isinstance(a, float) else a for a in args)
        return func(*args, **kwargs)


def _dropout(
    salt: Tensor, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _dropped(salt, input, p, training, inplace, input.shape)


def _dropout_channels(
    salt: Tensor, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    shape = (*input.shape[:2], *[1] * (input.dim() - 2))
    return _dropped(salt, input, p, training, inplace, shape)


def _dropped(
    salt: Tensor, input: Tensor, p: float, training: bool, inplace: bool, shape: Any
) -> Tensor:
    if not training or p == 0:
        return input
    # In whole numbers, which `Rounding` leaves alone: an element more or less is no rounding.
    kept = hashed(shape, salt) >= round(p * _VALUES)
    factor = kept.to(input.dtype) / max(1 - p, 1e-9)
    return input.mul_(factor) if inplace else input * factor


def _rand_like(salt: Tensor, input: Tensor, *, dtype: Any = None, **_how: Any) -> Tensor:
    return uniform(input.shape, salt).to(dtype or input.dtype)


def _randn_like(salt: Tensor, input: Tensor, *, dtype: Any = None, **_how: Any) -> Tensor:
    return _normal(input, salt).to(dtype or input.dtype)


def _normal(like: Tensor, salt: Tensor) -> Tensor:
    return torch.erfinv(2 * uniform(like.shape, salt) - 1) * math.sqrt(2)


def _bernoulli(salt: Tensor, input: Tensor, p: Any = None, **_how: Any) -> Tensor:
    rate = input if p is None else p
    return (uniform(input.shape, salt) < rate).to(input.dtype)


def _bernoulli_(salt: Tensor, self: Tensor, p: Any = 0.5, **_how: Any) -> Tensor:
    return self.copy_(uniform(self.shape, salt) < p)


def _uniform_(
    salt: Tensor, self: Tensor, from_: float = 0.0, to: float = 1.0, **_how: Any
) -> Tensor:
    return self.copy_(uniform(self.shape, salt) * (to - from_) + from_)


def _normal_(
    salt: Tensor, self: Tensor, mean: float = 0.0, std: float = 1.0, **_how: Any
) -> Tensor:
    return self.copy_(_normal(self, salt) * std + mean)


def _exponential_(salt: Tensor, self: Tensor, lambd: float = 1.0, **_how: Any) -> Tensor:
    return self.copy_(-torch.log(uniform(self.shape, salt)) / lambd)


_DRAWN: dict[Any, Callable[..., Tensor]] = {
    functional.dropout: _dropout,
    torch.dropout: _dropout,
    functional.dropout1d: _dropout_channels,
    functional.dropout2d: _dropout_channels,
    functional.dropout3d: _dropout_channels,
    torch.feature_dropout: _dropout_channels,
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
}
_DROPPING: dict[Any, int] = {
    functional.scaled_dot_product_attention: 4,
    functional.multi_head_attention_forward: 10,
}
"""Where `dropout_p` stands among their arguments."""
_RECURRENT: tuple[Any, ...] = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class Rounding(TorchDispatchMode):
    """While active and `on`, every operation's result is rounded: off by up to `amplitude`,
    relatively, on a grid that is drawn anew for each.

    That is what a number format does to a model, without its range and its kernels. Errors drawn
    for each element would cancel out where many add up, as in a bias' gradient; those of a format
    do not, as equal elements are rounded alike: of a trained ViT's gradients bf16 took some four
    times as far off as such draws, none further than 1.5 times as far as these
    (`benchmarks/results/rounding.md`).

    Args:
        amplitude: half a unit in the last place; 0 for float32's own.
        coarse: the shapes of weights with which products are taken in fp8.
    """

    def __init__(self, amplitude: float, coarse: frozenset[tuple[int, int]] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._amplitude = amplitude
        self._coarse = coarse
        self.on = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.on or not _computes(func):
            return func(*args, **(kwargs or {}))
        if _multiplies(func):
            # Weights and inputs are rounded as well, where their products are taken.
            least = fp8.OPERANDS if self._coarse and self._is_coarse(args) else 0.0
            args = tree_map_only(Tensor, partial(self._off, least=least), args)
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            return self._off(found)
        if isinstance(found, tuple | list):
            # Beyond the first, a forward operation returns statistics, kept in float32.
            rounded = len(found) if "backward" in str(func) else 1
            parts = [
                self._off(x) if at < rounded and isinstance(x, Tensor) else x
                for at, x in enumerate(found)
            ]
            return type(found)(parts)
        return found

    def _is_coarse(self, args: tuple[Any, ...]) -> bool:
        """Whether a product is one of a layer's: with its weight, or the gradient of that."""
        pair = [one for one in args if isinstance(one, Tensor) and one.dim() == 2][-2:]
        if len(pair) < 2:
            return False
        rows, inner, columns = *pair[0].shape, pair[1].shape[1]
        either = {(inner, columns), (columns, inner), (rows, columns), (columns, rows)}
        return not either.isdisjoint(self._coarse)

    def _off(self, result: Tensor, least: float = 0.0) -> Tensor:
        # A single number is a loss, which formats leave in float32.
        if not result.is_floating_point() or result.numel() == 1:
            return result
        amplitude = max(self._amplitude, least, 2 * torch.finfo(result.dtype).eps)
        grid = 1 + amplitude * (2 * torch.rand((), device=result.device) - 1)
        moved = (result.float() if result.itemsize < 4 else result) * grid
        rounded = _rounded(moved, amplitude) / grid
        return torch.where(rounded.isfinite(), rounded, result).to(result.dtype)


def _rounded(x: Tensor, amplitude: float) -> Tensor:
    """To as many bits as leave half a unit in the last place of `amplitude`, a power of two
    (Veltkamp's splitting: Muller et al., Handbook of Floating-Point Arithmetic, 4.4.1)."""
    split = x * (2 * amplitude / torch.finfo(x.dtype).eps + 1)
    return split - (split - x)


@cache
def _computes(func: Any) -> bool:
    """Whether an operation makes new numbers: no view, no change in place, no plain copy."""
    schema = func._schema
    return not (
        schema.is_mutable
        or any(result.alias_info is not None for result in schema.returns)
        or func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten._to_copy)
    )


@cache
def _multiplies(func: Any) -> bool:
    name = str(func)
    return any(part in name for part in ("mm", "conv", "linear", "attention", "baddbmm"))


def amplitude(dtype: torch.dtype | None, *, tf32: bool) -> float:
    """Half a unit in the last place: of autocast's dtype, else of TF32 or of float32."""
    if dtype is not None:
        return torch.finfo(dtype).eps / 2
    return 2.0**-11 if tf32 else 2.0**-24
