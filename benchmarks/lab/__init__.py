# SPDX-License-Identifier: Apache-2.0
"""Laboratory of the benchmarks: networks with a rate, jobs that run by turns, and what their workers have measured."""
