# SPDX-License-Identifier: Apache-2.0
"""Train the job ``digits`` of train.py, under the name that it had before there were others; the flags are train.py's.

python -m torch.distributed.run --standalone --nproc_per_node=2 examples/train_digits.py
"""

import sys

from train import main

if __name__ == "__main__":
    main(["digits", *sys.argv[1:]])
