# SPDX-License-Identifier: Apache-2.0
"""Planners, one a file, which partition the tensors of a model into merge buffers; published ones are in `papers`."""
