"""A config in the words of frameworks that own the training loop: one file a framework."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from advisor.frameworks.words import Framework

NAMES = ("hf", "lightning", "accelerate", "timm")
"""Of the files here that have a FRAMEWORK."""


def framework(name: str) -> Framework:
    """That of a name in NAMES; loads neither torch nor the framework itself."""
    found: Framework = importlib.import_module(f"advisor.frameworks.{name}").FRAMEWORK
    return found
