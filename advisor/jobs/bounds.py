"""The limits of what a worker may send to the server at once."""

MAX_STUDY = 8 * 2**20
"""Bytes of a file of a search."""
MAX_TRIALS = 200
"""In one heartbeat."""
