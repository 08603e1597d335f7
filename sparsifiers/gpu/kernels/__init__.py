"""Kernels in Triton. Only these modules import it, and only functions of `sparsifiers.gpu` import them."""
