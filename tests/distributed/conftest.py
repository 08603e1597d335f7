# SPDX-License-Identifier: Apache-2.0
"""Being here, put this folder on the path: tests of integrations/ start workers by launching.py, too."""
