"""Applying a resolved strategy to a job, and building what the user trains with."""

from atorch_ns.apply.apply import apply_strategy, dry_run, make_job, resolve_alike
from atorch_ns.job.optimizer.build import attach_optimizer
from atorch_ns.job.result import WATCH

__all__ = ["WATCH", "apply_strategy", "attach_optimizer", "dry_run", "make_job", "resolve_alike"]
