"""The steps of upgrades, in order."""
