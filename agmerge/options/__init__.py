"""What the arguments of :class:`agmerge.DistributedOptimizer` mean: compressors, memories, momentum."""
