"""What the ranks of ``test_ranks`` run."""

from __future__ import annotations

import os
import signal
import sys
import time

rank = int(os.environ["RANK"])
what = sys.argv[1]
sys.stdout.write(f"rank {rank} of {os.environ['WORLD_SIZE']} in {os.environ['LOCAL_RANK']}\n")
sys.stdout.flush()
if what == "fail" and rank == 1:
    sys.exit(7)
if what == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if what in ("hang", "fail", "killed"):
    time.sleep(60)
if what == "interrupt":
    signal.signal(signal.SIGINT, lambda *_: os._exit(5 if rank == 0 else 6))
    if rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
    else:
        sys.exit(0)
    time.sleep(60)
