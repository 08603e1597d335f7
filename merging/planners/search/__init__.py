"""Searches for partitions: pure functions that several planners share."""
