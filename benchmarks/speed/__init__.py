# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of speed have in common: the libraries that are compared, and shapes of well-known models."""
