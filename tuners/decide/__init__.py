"""What is advised of what was tried: the race, the comparison with fp32, the loader."""
