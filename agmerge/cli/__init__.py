# SPDX-License-Identifier: Apache-2.0
"""Run the commands of ``python -m agmerge``: doctor, build-horovod, plan, advise.

May import planning/ and below.
"""
