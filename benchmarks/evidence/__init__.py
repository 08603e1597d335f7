# SPDX-License-Identifier: Apache-2.0
"""Rooms of ``prove.py``: text, models, contenders, one training, jobs side by side, tables and pictures."""
