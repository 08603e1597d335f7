# SPDX-License-Identifier: Apache-2.0
"""Planners, which partition the tensors of a model into merge buffers.

* `exact`: the optimum, and `agmerge`.
* `simple`: `layerwise`, `single`, `count` and `threshold`.
* `papers`: published ones. `search`: functions that planners share.
"""
