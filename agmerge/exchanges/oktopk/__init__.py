# SPDX-License-Identifier: Apache-2.0
"""Combine by a global threshold: Ok-Topk, with a volume that does not grow with the number of workers.

``exchange``: the phases. ``histogram``, ``regions`` and ``reduction``: their mathematics, pure functions.
"""
