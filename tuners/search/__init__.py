"""Which configs to try, and which of them to advise."""
