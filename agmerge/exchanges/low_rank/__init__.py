"""Send two thin factors of each matrix in place of the matrix: PowerSGD and ACP-SGD.

`factors` has the mathematics, `bases` what ranks keep from step to step, `exchange` the messages.
"""
