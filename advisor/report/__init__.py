"""What people see: text, tables, charts, progress. Nothing here prints."""
