"""Search for partitions: pure functions that several planners share."""
