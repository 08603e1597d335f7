# SPDX-License-Identifier: Apache-2.0
"""Folder for the PYTHONPATH of a worker: ``horovod.py`` in it is found before an installed Horovod."""
