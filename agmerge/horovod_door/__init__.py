# SPDX-License-Identifier: Apache-2.0
"""Door for Horovod's scripts: they run unchanged where no Horovod is installed. Names and tables over the rooms below.

* ``stage/horovod.py``: the module ``horovod``, where PYTHONPATH has its folder, and the table of the modules in it.
* ``torch_names.py``: what is in ``horovod.torch``; ``by_name.py``: its asynchronous calls, matched by their names.
* ``optimizer.py``: ``DistributedOptimizer``; ``compression.py``: casts, and compressors of the script's own.
* ``elastic.py``: states and samplers, which survive lost workers; ``batch_norm.py``; ``timeline.py``.
* ``arguments.py``: the arguments of ``horovodrun``, and hosts. ``launch.py``: it starts workers and ends them.
  ``launch_elastic.py``: the same where workers come and go.
"""
