"""Known faults of torch's compiler that give wrong numbers, and options that avoid them.

The comparison with fp32 sees a few batches of one shape only, and may miss them.
"""

from __future__ import annotations

import re

from advisor.tuners.lazily import torch

_VERSION = re.compile(r"(\d{1,5})\.(\d{1,5})(?:\.\d+)?(a|b|rc|\.dev)?")


# Gradients of LayerNorms whose scales and shifts are parts of one parameter are never written:
# https://github.com/pytorch/pytorch/issues/193061. Pull request 193103 mends it, in 2.15.0.
# In 2.10 also, in bf16, the gradient of a convolution's bias before a sum with one number for each
# channel: https://github.com/pytorch/pytorch/issues/190796.
_SINCE, _MENDED = (2, 10), (2, 15)
_OPTIONS = {"triton.mix_order_reduction": False}


def avoiding(version: str) -> dict[str, bool]:
    """Inductor's options that avoid the faults of a release of torch, or of a build before it."""
    found = _VERSION.match(version)
    if found is None:
        return {}
    release, before = (int(found[1]), int(found[2])), bool(found[3])
    wrong = _SINCE <= release < _MENDED or (release == _MENDED and before)
    return dict(_OPTIONS) if wrong else {}


def avoided() -> dict[str, bool]:
    """Those for the torch that is loaded, as far as it knows them: it refuses others."""
    wanted = avoiding(torch.__version__)
    known = torch._inductor.list_options() if wanted else []
    return {name: value for name, value in wanted.items() if name in known}


def avoid() -> None:
    """Set them for all that this process compiles, as where a framework calls the compiler."""
    for name, value in avoided().items():
        setattr(torch._inductor.config, name, value)
