# SPDX-License-Identifier: Apache-2.0
"""Checks of ``gpu.py``, by what they judge, and the figures that they return."""
