"""Planning without ranks: what a strategy costs on a cluster, and the best strategies for it. Nothing is run but a trace."""

from atorch_ns.planning.in_code import estimate, plan, profile

__all__ = ["estimate", "plan", "profile"]
