"""Recipes of loops, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hypothesis import strategies as st

from tests.loops.loops import EVENTS, LOSSES, NUM_STEPS, OPTIMIZERS, STEPS, TAKES_SPARSE, WEIGHTED
from tests.loops.models import BLOCKS, CHANGES


@dataclass(frozen=True)
class Recipe:
    """A model and a loop, by the names of their pieces.

    Attributes:
        blocks: what the model is made of, in order.
        changes: what is done to it before it is trained.
        events: what happens before a step, with its number.
    """

    blocks: tuple[str, ...]
    changes: tuple[str, ...] = ()
    optimizer: str = "sgd"
    loss: str = "mean_square"
    step: str = "plain"
    events: tuple[tuple[int, str], ...] = ()


_PLAIN: Final = 6
"""How often the front end's own step is drawn more than another: pipelines have no other."""


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Small ones first, so that what fails shrinks to the pieces that make it fail."""
    step = draw(st.sampled_from(["plain"] * _PLAIN + list(STEPS)))
    losses = [loss for loss in LOSSES if loss != "counted" or step in WEIGHTED]
    optimizers = [name for name in OPTIMIZERS if name != "lbfgs" or step == "by_closure"]
    event = st.tuples(st.integers(1, NUM_STEPS - 1), st.sampled_from(list(EVENTS)))
    optimizer = draw(st.sampled_from(optimizers))
    blocks = [name for name in BLOCKS if name != "sparse" or optimizer in TAKES_SPARSE]
    return Recipe(
        blocks=tuple(draw(st.lists(st.sampled_from(blocks), min_size=2, max_size=4))),
        changes=tuple(draw(st.lists(st.sampled_from(list(CHANGES)), max_size=2, unique=True))),
        optimizer=optimizer,
        loss=draw(st.sampled_from(losses)),
        step=step,
        events=tuple(sorted(draw(st.lists(event, max_size=2)))),
    )
