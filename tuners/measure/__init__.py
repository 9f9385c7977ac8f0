"""What a config gives: workloads, timing, numerics, and the process that measures."""
