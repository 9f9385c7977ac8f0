"""Releases of torch whose compiler is known to compute something wrong, and what avoids that.

The comparison with fp32 (`tuners.measure.numerics`) strikes out what it sees, on a few batches of
one shape; what is known to be wrong for some shapes is better not compiled at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from advisor.tuners.lazily import torch

Release = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A fault of Inductor's.

    Attributes:
        what: is wrong.
        since: the first release that has it.
        until: the first one that has it no more.
        source: where it is told of.
        options: of Inductor's, as `torch.compile` takes them, without which it is not there.
    """

    what: str
    since: Release
    until: Release
    source: str
    options: Mapping[str, bool]

    def concerns(self, version: str) -> bool:
        """Whether a build of torch has it; one from before a release has not its mends."""
        first, second, *_ = map(int, re.findall(r"\d+", version))
        mended = torch.torch_version.TorchVersion(version) >= ".".join(map(str, self.until))
        return (first, second) >= self.since and not mended


KNOWN: tuple[Wrong, ...] = (
    Wrong(
        what="gradients of LayerNorms whose scales and shifts are parts of one parameter, which "
        "are never written",
        since=(2, 10),
        # By its sources: 2.14.1 has not the fix, pull request 193103; 2.15.0 has.
        until=(2, 15),
        source="https://github.com/pytorch/pytorch/issues/193061",
        options={"triton.mix_order_reduction": False},
    ),
    Wrong(
        what="the gradient of a convolution's bias, in bf16, where a number for each channel is "
        "added to what it gives",
        since=(2, 10),
        until=(2, 11),
        source="https://github.com/pytorch/pytorch/issues/190796",
        options={"triton.mix_order_reduction": False},
    ),
)


def avoiding(version: str) -> dict[str, bool]:
    """Inductor's options that avoid what is known to be wrong in a release of torch."""
    known = (wrong.options for wrong in KNOWN if wrong.concerns(version))
    return {name: value for options in known for name, value in options.items()}


def avoided() -> dict[str, bool]:
    """Those of the torch that is loaded, as far as it knows them: others it refuses."""
    wanted = avoiding(torch.__version__)
    if not wanted:
        return {}
    options = torch._inductor.list_options()
    return {name: value for name, value in wanted.items() if name in options}


def avoid() -> None:
    """Set them for all that this process compiles, as where a framework does it by itself."""
    for name, value in avoided().items():
        setattr(torch._inductor.config, name, value)
