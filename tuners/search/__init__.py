"""Which configs to try, and for how long."""
