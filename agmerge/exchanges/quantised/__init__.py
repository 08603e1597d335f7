# SPDX-License-Identifier: Apache-2.0
"""Quantised all-reduce: every element in few bits.

``shards``: which blocks an owner adds up. ``layout``: the bytes of a message. ``exchange``: what messages have in
common; ``gathered``: all ranks read all of them; ``two_phase``: each adds up its shard, and sends the mean.
"""
