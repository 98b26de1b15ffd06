"""Starting processes that train together: by torchrun, or as ranks of one command on this machine."""

from atorch_ns.processes.ranks import RankEnd, Ranks, run_local_ranks, scratch_folder
from atorch_ns.processes.torchrun import Launch, run_torchrun, threads_of_rank
from atorch_ns.system import num_usable_cores

__all__ = [
    "Launch", "RankEnd", "Ranks", "num_usable_cores", "run_local_ranks", "run_torchrun", "scratch_folder",
    "threads_of_rank",
]  # fmt: skip
