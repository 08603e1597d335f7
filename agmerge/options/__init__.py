"""Arguments of :class:`agmerge.DistributedOptimizer`: their meaning, checks and defaults.

``arguments``: as the script gave them. ``resolve``: checks them and makes a ``Config``. ``config``: the options of
a step. ``compressors``, ``momentum``, ``groups``, ``dense_cutoff``, ``density_policy`` and ``density_schedule``: one
argument each. ``from_params``: those of other projects' dictionaries. ``defaults``: of arguments that are left
out. ``notices``: warnings, given once; ``named_costs``: measured costs of named compressors.

May import exchanges/, runtime/, tensors/, backends/ and the packages ``sparsifiers`` and ``merging``.
"""
