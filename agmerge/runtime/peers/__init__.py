# SPDX-License-Identifier: Apache-2.0
"""Which peer is missing, and what it did last, to complete the error of a time-out.

* ``monitor``: asks the others, and reports which are missing.
* ``answers``: ranks' accounts of themselves, checked.
* ``status_server``: one question and answer over TCP, and pauses of this process.
* ``exit_guard``: tells the others why a process ends, and ends it.
"""
