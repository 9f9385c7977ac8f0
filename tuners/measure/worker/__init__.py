"""A Runner whose child process holds the device and the user's code."""
