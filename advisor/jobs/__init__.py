"""Tunings that are asked for: what travels, how it is packed, and the process that does it."""
