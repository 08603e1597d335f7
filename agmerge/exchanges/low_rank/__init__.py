"""Send two thin factors of each matrix in place of the matrix: PowerSGD and ACP-SGD.

`factors` and `orthonormal` have the mathematics, `bases` what ranks keep from step to step, `matrix` what is done with
one tensor, `exchange` the messages.
"""
