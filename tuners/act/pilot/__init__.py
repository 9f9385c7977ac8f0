"""The pilot sits in an unmodified training script, finds what trains there, and sets configs."""
