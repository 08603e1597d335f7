# SPDX-License-Identifier: Apache-2.0
"""Train the job ``gpt-stdlib`` of train.py, under the name that it had before; the flags are train.py's.

python -m torch.distributed.run --standalone --nproc_per_node=2 examples/train_lm.py              # sync="updates"
python -m torch.distributed.run --standalone --nproc_per_node=2 examples/train_lm.py --sync gradients --compression none
"""

import sys

from train import main

if __name__ == "__main__":
    main(["gpt-stdlib", *sys.argv[1:]])
