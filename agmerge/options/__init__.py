# SPDX-License-Identifier: Apache-2.0
"""Arguments of :class:`agmerge.DistributedOptimizer`: their meaning, checks and defaults.

``arguments``: as the script gave them. ``prepare``: what every wrapper calls; it checks them together, decides
the open ones, and returns the ``Config`` of a step. ``resolve``: the four records of that. ``compressors``, ``dense``,
``density_schedule``, ``plans`` and ``updates``: some arguments each. ``meaning``: what means nothing with a compressor.
``defaults``: of arguments that are left out.

``from_params``: arguments of other projects' dictionaries; ``keywords`` and ``published``: their names. ``notices``:
warnings, given once; ``named_costs``: measured costs of named compressors.

May import step/ and below, and the packages ``sparsifiers`` and ``merging``.
"""
