# SPDX-License-Identifier: Apache-2.0
"""Searches for partitions: pure functions that several planners share.

* `tables`: costs of every possible merge buffer, before a plan is chosen.
* `frontier`: edges, bounds, and the search over prefixes.
"""
