# SPDX-License-Identifier: Apache-2.0
"""Quantised all-reduce: every element in few bits.

* ``exchange``: in one phase all ranks read all messages; ``two_phase``: each adds up its shard, and sends the mean.
* ``layout``: which blocks an owner adds up, and the bytes of a message.
"""
