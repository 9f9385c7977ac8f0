"""How much a worker may send at once, and a server takes."""

MOST_STUDY = 8 * 2**20
"""Bytes of a file of a search."""
MOST_TRIALS = 200
"""In one beat."""
