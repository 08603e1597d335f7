"""Sparsifiers that are here to reproduce published results; for use, `topk`, `dgc` and quantisers are better."""
