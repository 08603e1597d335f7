"""A pretended accelerator: tensors say ``pretend:0`` and compute on the host, and what a GPU would do is counted.

``device`` has the tensors, ``operations`` what each operation costs, ``books`` what is written down of it, ``streams``
and ``clocks`` the order of things and what breaks it, ``nccl`` the collectives, ``training`` whole ranks.
"""
