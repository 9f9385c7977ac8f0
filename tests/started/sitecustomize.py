"""Read by every Python that a test starts: a collection is a seventh of what importing torch takes,
and finds nothing."""

import gc

gc.set_threshold(50_000, 20, 100)
