# SPDX-License-Identifier: Apache-2.0
"""Start workers: clusters, the command lines of launchers, sweeps, and the processes that come of them."""
