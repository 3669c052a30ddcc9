"""The callbacks: records, tables, bar, report."""
