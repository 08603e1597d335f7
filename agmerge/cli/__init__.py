# SPDX-License-Identifier: Apache-2.0
"""Commands of ``python -m agmerge``.

* ``doctor``: which backends work here. ``explain``: what an error means. ``plan``: all planners on one measured model.
* ``advise``: whether compression helps a script; ``advice``: what follows from measured steps; ``advisor``: the watch
  over it, ``advise_script`` and ``advise_watch``: what the script has and does.
* ``build_horovod``: a build for the torch that is here; ``cuda_toolkit``, ``nccl``: what that needs with GPUs.
* ``lighthouse``: the store of an elastic job.

May import step/, options/, backends/, and the public functions of the package.
"""
