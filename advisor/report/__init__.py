"""Text, tables, charts, pages and progress for people. `advisor.cli` prints them."""
