# SPDX-License-Identifier: Apache-2.0
"""Door for Horovod's scripts: they run unchanged where no Horovod is installed. Names and tables over the rooms below.

* ``stage/horovod.py``: the module ``horovod``, where PYTHONPATH has its folder, and the table of the modules in it.
* ``torch_names.py``: what is in ``horovod.torch``; ``by_name.py``: its asynchronous calls, matched by their names.
* ``distributed_optimizer.py``; ``compression.py``: casts, and compressors of the script's own.
* ``elastic.py``: states and samplers, which survive lost workers; ``batch_norm.py``; ``timeline.py``.
* ``arguments.py``: the arguments of ``horovodrun``, and hosts. ``processes.py``: workers, their output and their end.
* ``launch.py``: the commands, and jobs of a fixed size. ``launch_elastic.py``: jobs whose workers come and go.
"""
