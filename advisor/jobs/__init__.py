"""Submitted tunings (jobs): the request, the code archive, and the process that tunes."""
