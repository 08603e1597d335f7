"""Quantised all-reduce: every element in few bits, added up by shards.

``shards``: which blocks an owner adds up. ``layout``: the bytes of a message. ``exchange``: the messages of both
phases.
"""
