"""PyTorch's float32 switches, across the change of interface from torch 2.9 on.

Torch keeps an old and a new set of switches side by side. A reader of the old ones, and
torch.compile is one, is refused with 'mix of the legacy and new APIs' where the two disagree
(aten/src/ATen/Context.cpp: allowTF32CuDNN, allowTF32CuBLAS, float32MatmulPrecision). So both are
set here, to the same state, whatever was set before.
"""

from __future__ import annotations

import warnings

import torch

_TF32 = {"default": (False, True), "tf32": (True, True), "fp32": (False, False)}
"""Whether matrix products and whether cuDNN may use TF32."""


def set_float32(precision: str) -> None:
    """Set what float32 matrix products, convolutions and recurrent layers are computed in.

    Args:
        precision: 'default' (TF32 in cuDNN, not in matrix products), 'tf32' (in both) or
            'fp32' (in neither).

    Raises:
        ValueError: another precision.
    """
    if precision not in _TF32:
        raise ValueError(f"float32 precision {precision!r}: expected one of {', '.join(_TF32)}")
    matmul, cudnn = _TF32[precision]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns that the old switches will go
        # Not matmul.allow_tf32: that leaves oneDNN's precision as an earlier 'medium' or 'high'
        # set it, and then torch.get_float32_matmul_precision() is refused.
        torch.set_float32_matmul_precision("high" if matmul else "highest")
        torch.backends.cudnn.allow_tf32 = cudnn
        if not hasattr(torch.backends.cudnn, "fp32_precision"):
            return
        # `allow_tf32 = False` makes conv and rnn inherit, which a wider fp32_precision = 'tf32'
        # turns on again; and leaving `torch.backends.cudnn.flags()` does the same anew. Where
        # TF32 is on, the wider one stays unset, so that the user's `allow_tf32 = False` works.
        torch._C._set_fp32_precision_setter("cuda", "all", "none" if cudnn else "ieee")
        if not cudnn:
            for op in ("conv", "rnn"):
                torch._C._set_fp32_precision_setter("cuda", op, "ieee")


def describe() -> str:
    """What is set now, as 'matmul=ieee conv=tf32 rnn=tf32'."""
    if hasattr(torch.backends.cudnn, "fp32_precision"):
        found = {
            op: torch._C._get_fp32_precision_getter("cuda", op) for op in ("matmul", "conv", "rnn")
        }
    else:
        cudnn = torch.backends.cudnn.allow_tf32
        allowed = {"matmul": torch.backends.cuda.matmul.allow_tf32, "conv": cudnn, "rnn": cudnn}
        found = {op: "tf32" if tf32 else "ieee" for op, tf32 in allowed.items()}
    return " ".join(f"{op}={precision}" for op, precision in found.items())
