# SPDX-License-Identifier: Apache-2.0
"""Sparsifiers that are here to reproduce published results; for use, `topk`, `dgc` and quantisers are better.

* `adtopk`: rows that take turns. `threshold`: a fixed one, or one that follows k.
* `gaussiank`, `redsync`, `sidco`: estimated thresholds.
"""
