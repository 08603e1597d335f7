# SPDX-License-Identifier: Apache-2.0
"""Published methods in plain torch, each on a page: all ranks are a list in one process.

What the library does in buffers, threads and compiled loops is compared with these in `tests`. Each formula stands
beside its line, with the place in the paper. Nothing here imports the library.
"""
