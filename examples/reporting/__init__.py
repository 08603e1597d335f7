"""Read what runs left behind, and compare it: logs, tables and curves."""
