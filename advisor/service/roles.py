"""What a token may do; the command line has it without the server's libraries."""

ROLES = ("read", "submit", "worker", "admin")
"""Each may do all that the one before it may: look up; ask for tunings; write records; make tokens.
"""
