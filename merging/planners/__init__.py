"""Partition the tensors of a model into merge buffers: a planner a file, and what they search with."""
