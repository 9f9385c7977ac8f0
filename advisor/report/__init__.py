"""What people see: text, tables, charts, pages, progress. Nothing here prints."""
