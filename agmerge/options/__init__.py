# SPDX-License-Identifier: Apache-2.0
"""Arguments of :class:`agmerge.DistributedOptimizer`: their meaning, checks and defaults.

* ``resolve``: all options checked together, and the ``Config`` of a step; every wrapper calls ``prepare`` there.
* ``typed``: options as a script gives them, unknown keywords, and types for editors.
* ``compressors``: ``compression``, ``memory``, ``density``, ``dense``, ``warmup``, ``merging``, ``groups`` as objects.
* ``meaning``: options that mean nothing with a compressor.
* ``momentum``: momentum of an optimizer, if a memory applies it before selection.
* ``defaults``: options that are left out, the measured costs of compressors, and warnings.
* ``from_params``, ``published``: dictionaries and names of other projects.

May import step/ and below, and the packages ``sparsifiers`` and ``merging``.
"""
