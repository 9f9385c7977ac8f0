"""A whole training step, captured as one CUDA graph and replayed if the result is the same."""
