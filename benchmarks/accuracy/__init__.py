# SPDX-License-Identifier: Apache-2.0
"""Paired trainings of ``parity.py``: its tasks and optimizers, its groups of cases, its report."""
