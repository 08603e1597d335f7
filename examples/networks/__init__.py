# SPDX-License-Identifier: Apache-2.0
"""Define the networks of the published experiments, tiny and full."""
