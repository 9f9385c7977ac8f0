"""apply() and lookup(): find a record, answer from it, agree among ranks."""
