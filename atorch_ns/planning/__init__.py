"""Planning without ranks: costs of a strategy on a cluster, and its best strategies. Only a trace is run."""

from atorch_ns.planning.in_code import estimate, plan, profile

__all__ = ["estimate", "plan", "profile"]
