# SPDX-License-Identifier: Apache-2.0
"""Searches for partitions: pure functions that several planners share."""
