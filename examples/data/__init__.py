# SPDX-License-Identifier: Apache-2.0
"""Read data sets in their real formats; :mod:`data.small` writes small ones. Nothing is downloaded."""
