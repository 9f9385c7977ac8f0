"""The callback; importing this file loads Lightning."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from advisor.errors import AdvisorWarning
from advisor.tuners import fingerprint

if TYPE_CHECKING:
    from torch import nn

    from advisor.tuners.act.advice import Advice


class AdvisorCallback(Callback):  # type: ignore[misc] # Lightning's types are not read
    """Lays out and compiles the module that was tuned.

    Attributes:
        arguments: what Trainer takes beside it.
        advice: what is followed.
    """

    def __init__(self, advice: Advice, arguments: dict[str, Any]) -> None:
        self.advice = advice
        self.arguments = arguments

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before the strategy wraps and moves the model, and configures its optimizers."""
        record = self.advice.record
        if stage != "fit" or record is None:
            return
        tuned = _tuned(pl_module, record.key.model, record.provenance.parameters)
        if tuned is not None:
            self.advice.lay_out(tuned)
            return
        warnings.warn(
            f"advisor: {type(pl_module).__name__} has no part that is the module tuned as "
            f"{record.target.name}: neither its memory format nor its compilation is touched",
            AdvisorWarning,
            stacklevel=2,
        )


def _tuned(whole: nn.Module, model: str, parameters: int) -> nn.Module | None:
    """The part of a module that has a fingerprint; those of another size are not looked at."""
    for part in whole.modules():
        if fingerprint.size(part)[1] == parameters and fingerprint.of_model(part) == model:
            return part
    return None
