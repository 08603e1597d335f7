"""Say what the arguments of :class:`agmerge.DistributedOptimizer` mean.

``arguments``: as the script gave them. ``resolve``: checks them and makes a ``Config``. ``config``: what a step needs
to know. ``compressors``, ``momentum``, ``groups``, ``dense_cutoff``, ``density_policy`` and ``density_schedule``: one
argument each. ``from_params``: those of other projects' dictionaries. ``defaults``: what nobody has named.
``notices``: what a script is told once; ``named_costs``: the figures of what a named compressor cost.

May import exchanges/, runtime/, tensors/, backends/ and the packages ``sparsifiers`` and ``merging``.
"""
