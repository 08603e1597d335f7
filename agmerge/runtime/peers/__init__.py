# SPDX-License-Identifier: Apache-2.0
"""Find out which peer is missing and its last activity, to complete the error of a time-out.

``monitor``: asks and answers. ``answers``: ranks' accounts of themselves, checked. ``report``: which ranks are missing,
by the answers. ``status_server``: the TCP port behind it. ``pauses``: when this process did not run. ``exit_guard``:
tells the others why a process ends, and ends it.
"""
