"""What an optimizer that keeps this rank's part in another one shows of it."""

from __future__ import annotations

from typing import Any

__all__ = ["show_part"]


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
