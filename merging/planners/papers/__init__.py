# SPDX-License-Identifier: Apache-2.0
"""Planners that reproduce published ones, with their faults; for use, `agmerge` is better."""
