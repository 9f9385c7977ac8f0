"""Importing this module loads Lightning."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from advisor.errors import AdvisorWarning
from advisor.tuners import fingerprint

if TYPE_CHECKING:
    from advisor.tuners.act.advice import Advice


class AdvisorCallback(Callback):  # type: ignore[misc] # Lightning's types are not read
    """Sets the memory format of the tuned module and compiles it; pass `arguments` to Trainer."""

    def __init__(self, advice: Advice, arguments: dict[str, Any]) -> None:
        self.advice, self.arguments = advice, arguments

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called before the strategy wraps and moves the model, and configures its optimizers."""
        record = self.advice.record
        if stage != "fit" or record is None:
            return
        for part in pl_module.modules():
            # The size first, because a size costs less than a fingerprint.
            same_size = fingerprint.size(part)[1] == record.provenance.parameters
            if same_size and fingerprint.of_model(part) == record.key.model:
                self.advice.lay_out(part)
                return
        warnings.warn(
            f"advisor: {type(pl_module).__name__} does not contain the module that was tuned as "
            f"{record.target.name}, so advisor sets no memory format and compiles nothing",
            AdvisorWarning,
            stacklevel=2,
        )
