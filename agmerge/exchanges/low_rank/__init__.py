# SPDX-License-Identifier: Apache-2.0
"""Send two thin factors of each matrix in place of the matrix: PowerSGD and ACP-SGD.

`factors` and `orthonormal` have the mathematics, `bases` the bases that ranks keep from step to step, `matrix` the
operations on one tensor, `exchange` the messages.
"""
