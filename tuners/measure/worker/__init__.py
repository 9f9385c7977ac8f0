"""The runner that measures: a child process holds the device and the user's code."""
