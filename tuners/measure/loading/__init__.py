"""The loader of a workload's own data: by itself, and with the step that it feeds."""
