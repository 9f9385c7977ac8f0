"""How a config acts on a workload, is measured and is found."""
