# SPDX-License-Identifier: Apache-2.0
"""Read what runs left behind, and compare it: logs, tables and curves."""
