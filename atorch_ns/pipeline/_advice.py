"""What a user of a pipeline has to know."""

from __future__ import annotations

__all__ = ["train_step_only"]


def train_step_only(method: str) -> str:
    """In one sentence: a pipeline is run as a whole, so that a training loop of one's own cannot call the model.

    Args:
        method: the name of the method that cuts the model.
    """
    return (
        "a pipeline is run by result.train_step(batch) and result.train_step.evaluate(batch) alone, and "
        f"result.model cannot be called; for a training loop of your own, search with excluded=[{method!r}]"
    )
