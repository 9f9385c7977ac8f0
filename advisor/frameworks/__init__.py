"""Configs as settings of frameworks that own the training loop."""

NAMES = ("hf", "lightning", "accelerate", "timm")
"""Each is a Framework in `advisor.frameworks.tables`."""
