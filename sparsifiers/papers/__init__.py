# SPDX-License-Identifier: Apache-2.0
"""Sparsifiers that are here to reproduce published results; for use, `topk`, `dgc` and quantisers are better."""
