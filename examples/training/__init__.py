# SPDX-License-Identifier: Apache-2.0
"""Train a job: from the command line to a loop, through its epochs, with what it leaves behind."""
