"""A whole training step recorded once and replayed, where that comes to the same."""
