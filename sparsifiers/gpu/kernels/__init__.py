# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton. Only these modules import it, and only functions of `sparsifiers.gpu` import them.

All atomic operations are relaxed: what they write is read by kernels that are launched later. Others would flush a
processor's cache each time.
"""
