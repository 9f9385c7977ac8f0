"""A config, resolved to its changes of a training step."""

from __future__ import annotations

from typing import Any

import torch

from advisor.cache.config import BATCH, Config
from advisor.tuners.knobs import CHECKPOINT, KNOBS, OFFLOAD, WORKERS, Knob


def changed_knobs(config: Config, default: Config) -> tuple[Knob, ...]:
    """The knobs whose value in `config` is not the default; True and 1 differ."""
    changed = {*config.changed(default)}
    if config.batch and config.batch != default.batch:
        changed.add(BATCH)
    return tuple(knob for knob in KNOBS if knob.name in changed)


class AppliedConfig:
    """The knobs that a config changes on a device, and their effect on a step."""

    def __init__(self, config: Config, default: Config, device: torch.device) -> None:
        self.rows = rows = tuple((k, config[k.name]) for k in changed_knobs(config, default))
        # The knobs that set a batch's memory format:
        self.layouts = [
            (k.layout, value) for k, value in rows if k.layout and (value or k.name in default)
        ]
        formats = (k.autocast[value] for k, value in rows if value in k.autocast)
        self.autocast = getattr(torch, name) if (name := next(formats, "")) else None
        self.scaled = any(value in k.scaled for k, value in rows)
        beside = any(value in k.non_blocking for k, value in rows)
        self.non_blocking = device.type == "cuda" and beside
        self.graphs = any(value in k.graphs for k, value in rows)  # made by torch.compile
        self.captured = any(value in k.captured for k, value in rows)
        self.compiles = any(k.model and not k.layout for k, _value in rows)
        self.every = int(config.get(CHECKPOINT) or 0)  # one of so many blocks is checkpointed
        self.offloads = bool(config.get(OFFLOAD))
        # Configs that turn the script's own settings off are measured and never advised:
        undone = [(k, default[k.name]) for k, v in rows if k.name in default and v == k.default]
        self.undoes_autocast = any(own in k.autocast for k, own in undone)
        self.undoes_compile = any(k.compile_s and own != k.default for k, own in undone)
        self.any_size = any(k.name == "dynamic_shapes" and value for k, value in rows)

    def optimizer(self) -> dict[str, Any]:
        """Keyword arguments for torch.optim's optimizers."""
        return {"fused": True} if any(k.optimizer and value for k, value in self.rows) else {}

    def loader(self) -> dict[str, Any]:
        """Keyword arguments for torch.utils.data.DataLoader."""
        found: dict[str, Any] = {knob.name: value for knob, value in self.rows if knob.loader}
        if found.get(WORKERS) == 0:
            found.pop("prefetch_factor", None)  # a DataLoader without workers refuses this argument
        return found
