"""What is remembered: records, how they are matched, and where they are kept."""
