"""Know which workers there are, and let scripts talk among them.

``workers``: ``init``, ``rank``, ``size``, ``shutdown`` and the choice of a backend. ``collectives/``: what
``horovod.torch`` offers on single tensors and objects. ``broadcast``: parameters and optimizer state. ``process_sets``:
groups of ranks. ``call_agreement``: every rank says what it is about to do. ``peers/``: who is missing, and where.
``horovod_names``: objects of Horovod's that scripts hand over.

May import backends/, tensors/ and the ground files.
"""
