"""Applies a config: in a loop that uses Advice, in an unmodified script, to a whole step."""
