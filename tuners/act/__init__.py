"""How a config acts: in a loop written with Advice, over a whole step, among ranks."""
