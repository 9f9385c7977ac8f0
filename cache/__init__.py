"""Records: what they hold, how they are matched, and where they are stored."""
