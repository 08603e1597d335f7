# SPDX-License-Identifier: Apache-2.0
"""Planners that reproduce published ones, with their faults; for use, `agmerge` is better.

* `agtf`, `fgbuff`, `mgwfbp`, `omgs`: by predicted times. `dear`, `horovod`: by size, or by cycles.
"""
