"""Planners that reproduce published ones, with their faults; for use, `agmerge` is better."""
