"""Arguments of :class:`agmerge.DistributedOptimizer`: their meaning, checks and defaults.

``arguments``: as the script gave them. ``resolve``: checks them and makes the ``Config`` of a step. ``compressors``,
``density_schedule`` and ``updates``: some arguments each. ``from_params``: those of other projects' dictionaries.
``defaults``: of arguments that are left out. ``notices``: warnings, given once; ``named_costs``: measured costs of
named compressors.

May import step/ and below, and the packages ``sparsifiers`` and ``merging``.
"""
