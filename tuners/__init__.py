"""Applies configs to a training step, measures them, and searches for the best."""
