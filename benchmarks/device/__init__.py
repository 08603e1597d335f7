"""Checks of ``gpu.py``, by what they judge, and the figures that they return."""
