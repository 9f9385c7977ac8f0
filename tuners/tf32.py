"""PyTorch's switches of a number format, before and after their interface changed in torch 2.9.

Where the old and the new switches disagree, reading an old one, as torch.compile does, raises
'mix of the legacy and new APIs' (aten/src/ATen/Context.cpp). So both are set here to one state.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from advisor.tuners.torch_facts import torch

_TF32 = {"default": (False, True), "fp32": (False, False)}
"""Whether matrix products, and whether cuDNN's operations, may use TF32. Both may with 'tf32' and
in operations that autocast leaves in float32, as in the measured tables."""
EPS = 2.0**-10
"""Distance from 1 to the next number in TF32."""


def set_float32(precision: str) -> None:
    """Set which float32 operations use TF32: with 'default' cuDNN's convolutions and recurrent
    layers, with 'fp32' none, else also matrix products. Also tag code that is compiled from now on:
    torch 2.11 finds bf16 code in its cache when it compiles the same model for fp16
    (https://github.com/pytorch/pytorch/pull/181564)."""
    _compiler().cache_key_tag = precision
    matmul_tf32, cudnn_tf32 = _TF32.get(precision, (True, True))
    cudnn: Any = torch.backends.cudnn
    with warnings.catch_warnings(action="ignore"):  # torch 2.9 announces the old switches' end
        # 'highest' first: it also takes oneDNN's matmul back from 'medium' or 'high'. Left there,
        # changing matmul.allow_tf32 would make torch.get_float32_matmul_precision() refuse.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_tf32 = matmul_tf32
        cudnn.allow_tf32 = cudnn_tf32
        if not _new_switches():
            return
        # While the old switch is off, conv and rnn inherit from cudnn.fp32_precision, or if that is
        # "none" from torch.backends.fp32_precision, also after `with torch.backends.cudnn.flags()`.
        # Not set to "tf32", because the old switch could then no longer turn TF32 off.
        cudnn.fp32_precision = "none" if cudnn_tf32 else "ieee"
        if not cudnn_tf32:
            cudnn.conv.fp32_precision = "ieee"
            cudnn.rnn.fp32_precision = "ieee"


class Float32(NamedTuple):
    """The state of all these switches, which other code may mix as it likes."""

    tag: str  # in the keys of compiled code
    matmul: str | None  # an old switch; None if torch refuses to read it
    cudnn: bool | None  # an old switch, as `matmul`
    new: tuple[str, ...]  # the switches of torch 2.9 and later; empty before

    @classmethod
    def now(cls) -> Float32:
        with warnings.catch_warnings(action="ignore"):
            matmul = _unless_refused(torch.get_float32_matmul_precision)
            cudnn = _unless_refused(lambda: torch.backends.cudnn.allow_tf32)
            new = tuple(one.fp32_precision for one in _new_switches())
            return cls(_compiler().cache_key_tag, matmul, cudnn, new)

    def put_back(self) -> None:
        _compiler().cache_key_tag = self.tag
        with warnings.catch_warnings(action="ignore"):
            if self.matmul is not None:
                torch.set_float32_matmul_precision(self.matmul)
            if self.cudnn is not None:
                torch.backends.cudnn.allow_tf32 = self.cudnn
            for switch, held in zip(_new_switches(), self.new, strict=True):
                # Set only what differs, so that a switch that inherits still inherits.
                if switch.fp32_precision != held:
                    switch.fp32_precision = held

    def __str__(self) -> str:
        return describe()


def _compiler() -> Any:
    return importlib.import_module("torch.compiler.config")


def _unless_refused(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:  # 'mix of the legacy and new APIs'
        return None


def _new_switches() -> tuple[Any, ...]:
    backends: Any = torch.backends
    cudnn = backends.cudnn
    if not hasattr(cudnn, "fp32_precision"):
        return ()
    return backends.cuda.matmul, backends.mkldnn.matmul, cudnn, cudnn.conv, cudnn.rnn


def describe() -> str:
    """The current settings, as 'matmul=ieee conv=tf32 rnn=tf32'."""
    backends: Any = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    if _new_switches():
        found = [one.fp32_precision for one in (matmul, cudnn.conv, cudnn.rnn)]
    else:
        found = ["tf32" if one.allow_tf32 else "ieee" for one in (matmul, cudnn, cudnn)]
    return "matmul={} conv={} rnn={}".format(*found)
