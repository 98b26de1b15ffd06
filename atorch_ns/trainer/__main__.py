"""``torchrun … -m atorch_ns.trainer -f config.yaml [--path.to.field value …]``."""

from __future__ import annotations

import sys

from atorch_ns.trainer.run import train

if __name__ == "__main__":
    train(sys.argv[1:])
