# SPDX-License-Identifier: Apache-2.0
"""A pretended accelerator: tensors say ``pretend:0`` and compute on the host, and what a GPU would do is counted.

``tensors`` are the host's in disguise (``registration`` tells torch of them), ``operations`` says what each operation
costs, ``books`` what was asked for, ``device`` and ``streams`` in which order, ``clocks`` and ``pinned`` what that
order leaves open, ``kernels`` what is one launch; ``nccl`` has the collectives, ``training`` whole ranks.
``process_groups`` have collectives that take time, in that of ``hosts``, for the library's own backend.
"""
