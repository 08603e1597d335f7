# SPDX-License-Identifier: Apache-2.0
"""Two thin factors of each matrix in place of the matrix: PowerSGD and ACP-SGD.

* ``bases``: the mathematics, and the bases that ranks keep from step to step.
* ``exchange``: the messages.
"""
