# SPDX-License-Identifier: Apache-2.0
"""Workers that are killed and replaced under several libraries; ``benchmarks/elastic_others.py`` is the command."""
