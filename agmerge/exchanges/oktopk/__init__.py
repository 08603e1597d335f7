# SPDX-License-Identifier: Apache-2.0
"""Ok-Topk, a sum by a global threshold, with a volume that does not grow with the number of workers.

* ``exchange``: the phases, and their mathematics.
* ``regions``: which rank adds up what.
"""
