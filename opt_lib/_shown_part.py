"""What an optimizer that keeps this rank's part in another one shows of it."""

from __future__ import annotations

from functools import cache
from typing import Any

from atorch_ns.errors import CheckpointError

__all__ = ["show_part", "with_checkpoint_hint"]


class _CheckpointHint:
    """Goes before an optimizer's class; says what saves the states that its ranks have in parts."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The optimizer's own, by its arguments, if it has been put together on this rank.

        Raises:
            CheckpointError: if it has not.
        """
        try:
            found: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc]  # of the optimizer
        except RuntimeError as error:
            if "consolidated" not in str(error):
                raise
            raise CheckpointError(
                "optim.state_dict() is not there: each rank has the states of the parameters that it updates. Save by "
                "atorch_ns.checkpoint.save(folder, result) and load by atorch_ns.checkpoint.load, under any strategy. "
                "For the states in one place alone, call optim.consolidate_state_dict on all ranks first."
            ) from error
        return found


@cache
def with_checkpoint_hint(kind: type[Any]) -> type[Any]:
    """``kind`` with a ``state_dict`` that says what to use in its place; the class itself stays as it is.

    Args:
        kind: torch's ``ZeroRedundancyOptimizer`` or fairscale's ``OSS``.
    """
    return type(kind.__name__, (_CheckpointHint, kind), {"__doc__": kind.__doc__})


def show_part(optimizer: Any) -> None:
    """Gives ``optimizer`` the defaults and the state of ``optimizer.optim``, which has this rank's parameters.

    Schedulers such as OneCycleLR ask the optimizer they are given for what its defaults hold, and users look up
    step counts in its state. What it would keep itself stays empty.

    Args:
        optimizer: torch's ``ZeroRedundancyOptimizer`` or fairscale's ``OSS``.
    """
    optimizer.defaults.update(optimizer.optim.defaults)
    _share_state(optimizer)
    optimizer.register_load_state_dict_post_hook(_share_state)  # loading gives it a dict of its own


def _share_state(optimizer: Any) -> None:
    optimizer.state = optimizer.optim.state
