"""A run that is measured: the user's own command, started with a pilot inside."""
