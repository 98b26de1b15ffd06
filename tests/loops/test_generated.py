"""Loops that nobody wrote: put together at random, they train as in one process under every strategy, or say what would differ."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, reject, seed, settings

from tests.loops import judge as judges
from tests.loops.judge import STRATEGIES, judge
from tests.loops.recipes import Recipe, recipes
from tests.sample import commit_number

pytestmark = pytest.mark.processes

_NUM_LOOPS = 60
"""In ``make test``; ``python -m tests.loops 2000`` runs as many as one has time for."""


@pytest.mark.timeout(1800)
@seed(commit_number())
@settings(max_examples=_NUM_LOOPS, database=None, suppress_health_check=list(HealthCheck), print_blob=False)
@given(recipe=recipes())
def test_a_loop_trains_as_in_one_process_or_says_what_would_differ(recipe: Recipe) -> None:
    try:
        verdicts = judge(recipe)
    except judges.NoLoop:
        reject()
    assert all(verdict.is_fine for verdict in verdicts.values()), verdicts


PLAIN = Recipe(blocks=("plain", "plain"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "recipe",
    [PLAIN, Recipe(blocks=("norm", "lookup"), optimizer="adamw", step="twice", events=((2, "freeze"),))],
)
def test_plain_loops_are_not_refused(recipe: Recipe) -> None:
    """Refusing is no way to be right: what users do every day has to train."""
    strategies = [name for name in STRATEGIES if name != "pipeline" or recipe.step == "plain"]
    assert {name: verdict.kind for name, verdict in judge(recipe, strategies).items()} == dict.fromkeys(
        strategies, "equal"
    )


FOUND = [
    # Operators on lists of gradients of which some are divided.
    (Recipe(blocks=("plain", "plain"), step="keeping_zeros"), {"tensor": "equal"}),
    # Functions of gradients are called in each backward pass of a loop of the user's.
    (
        Recipe(blocks=("plain", "plain"), changes=("hook_gradients", "hook_sums"), step="in_parts"),
        dict.fromkeys(("ddp", "zero1", "zero2", "fsdp", "tensor"), "equal"),
    ),
    (
        Recipe(blocks=("plain", "plain"), changes=("hook_sums",), step="twice"),
        dict.fromkeys(("ddp", "fsdp", "tensor"), "equal"),
    ),
    # A method of which the rank with the first blocks could run more than others.
    (Recipe(blocks=("plain", "plain"), step="another_method"), {"pipeline": "refused"}),
    # Gradients that torch.autograd.grad does not find.
    (
        Recipe(blocks=("plain", "plain"), step="gradients_by_function"),
        {"ddp": "equal", "fsdp": "told", "zero2": "told"},
    ),
    # Gradients that hold the rows that were used: torch's reducer averages those beside them wrongly.
    (
        Recipe(blocks=("plain", "sparse")),
        {"ddp": "equal", "zero1": "equal", "fsdp": "refused", "zero2": "refused", "tensor": "equal"},
    ),
    # A closure that the optimizer does not call, so that no update exchanges anything.
    (
        Recipe(blocks=("plain", "plain"), optimizer="decaying", step="by_closure"),
        dict.fromkeys(("ddp", "zero1", "zero2", "fsdp", "tensor"), "equal"),
    ),
    # A table of two stages whose gradient holds the rows that were used.
    (Recipe(blocks=("sparse", "pairs"), changes=("share_block",)), {"pipeline": "equal", "ddp": "equal"}),
    # Hooks, and gradients that the loop puts in the place of the last step's.
    (
        Recipe(blocks=("plain", "plain"), changes=("hook_gradients",), step="gradients_by_function"),
        {"ddp": "equal", "zero1": "equal", "tensor": "equal", "ddp, micro-batches": "equal"},
    ),
    # Hooks that come between a forward pass and two backward passes through it, and in a method's pass.
    (
        Recipe(blocks=("plain", "plain"), step="twice", events=((1, "hook_gradients_late"),)),
        dict.fromkeys(("ddp", "zero1", "fsdp", "zero2", "tensor"), "equal"),
    ),
    (
        Recipe(blocks=("plain", "plain"), step="another_method", events=((1, "hook_gradients_late"),)),
        dict.fromkeys(("ddp", "zero1", "fsdp", "zero2"), "equal"),
    ),
    # A layer that nothing uses, in two stages: a gradient of zero in the place of none, which an optimizer decays by.
    (Recipe(blocks=("idle", "plain"), changes=("share_block",), optimizer="decaying"), {"pipeline": "equal"}),
    # Sparse gradients beside a layer that tensor parallelism divides, in its check of what it divided.
    (
        Recipe(blocks=("functional", "adapted", "sparse"), changes=("hook_sums",), optimizer="adagrad"),
        {"tensor": "equal"},
    ),
    # Penalties that reach weights before, or without, the pass of the model that hooks wait for.
    (
        Recipe(
            blocks=("plain", "plain"),
            changes=("hook_gradients",),
            step="regularised_after",
            events=((2, "hook_gradients_late"),),
        ),
        dict.fromkeys(("ddp", "zero1", "fsdp", "zero2", "tensor"), "equal"),
    ),
    (
        Recipe(
            blocks=("convolved", "pairs"),
            optimizer="nested",
            step="anchored",
            events=((2, "hook_gradients_late"),),
        ),
        dict.fromkeys(("fsdp", "zero2"), "equal"),
    ),
    # Steps after a pass that gathered weights again.
    (
        Recipe(blocks=("plain", "plain"), optimizer="adamw", step="probed"),
        dict.fromkeys(("fsdp", "zero2"), "equal"),
    ),
    # Gradients in the place of earlier ones, which a reducer moves to its memory.
    (
        Recipe(
            blocks=("convolved", "plain"), step="gradients_by_function", events=((3, "hook_gradients_late"),)
        ),
        dict.fromkeys(("ddp", "zero1", "ddp, micro-batches"), "equal"),
    ),
    # One vector of parts and of whole numbers.
    (
        Recipe(blocks=("scaled", "plain"), optimizer="lbfgs", step="by_closure"),
        {"fsdp": "refused", "zero2": "refused", "tensor": "refused", "ddp": "equal"},
    ),
    # What no sample reaches, in the second of two micro-batches.
    (
        Recipe(blocks=("single", "lookup"), changes=("detach",), optimizer="adamw"),
        {"fsdp": "equal", "fsdp, micro-batches": "equal"},
    ),
    # Frozen while gathered, after a step that was left out, and then looked at.
    (
        Recipe(blocks=("plain", "norm"), step="skipped", events=((2, "freeze"), (2, "look_at_states"))),
        {"fsdp": "equal", "zero2": "equal"},
    ),
    # A number without dimensions, which fsdp leaves to a sum of its own, used by a method beside forward.
    (Recipe(blocks=("scaled", "norm"), step="another_method"), {"fsdp": "equal", "zero2": "equal"}),
    # Gradients that are put in place by hand are no backward pass.
    (
        Recipe(blocks=("plain", "plain"), changes=("hook_sums",), step="gradients_by_function"),
        {"ddp": "equal"},
    ),
    # What is written, thawed or updated while a forward pass without a backward pass has left parameters gathered.
    (Recipe(blocks=("plain", "plain"), step="looked_at"), {"fsdp": "equal", "zero2": "equal"}),
    (
        Recipe(
            blocks=("plain", "plain"),
            changes=("freeze_first",),
            step="skipped",
            events=((2, "thaw"), (3, "change_data")),
        ),
        {"fsdp": "equal", "zero2": "equal"},
    ),
    # Losses that read the weights.
    (Recipe(blocks=("plain", "norm"), step="regularised_whole"), {"fsdp": "equal", "tensor": "equal"}),
    (Recipe(blocks=("plain", "plain"), step="clipped_by_torch"), {"fsdp": "equal", "tensor": "equal"}),
    # An optimizer that a rank's part of the parameters is too little for.
    (
        Recipe(
            blocks=("clamped", "pruned", "weight norm", "pruned"),
            changes=("tie", "freeze_first"),
            optimizer="nested",
        ),
        {"zero1": "refused"},
    ),
    # The same beside a tensor axis.
    (
        Recipe(blocks=("single", "repeated"), step="skipped", events=((2, "change_data"),)),
        {"tensor, fsdp": "equal", "tensor, ddp": "equal"},
    ),
    (Recipe(blocks=("plain", "plain"), step="looked_at"), {"tensor, ddp": "equal", "tensor, zero2": "equal"}),
    # A method beside forward, of a model that a tensor axis divides too.
    (
        Recipe(blocks=("plain", "plain"), step="another_method"),
        {"tensor, ddp": "equal", "tensor, zero1": "equal", "tensor, zero2": "equal"},
    ),
    # And of one that is compiled, and writes to weights: the hooks that look for both are not compiled.
    (
        Recipe(blocks=("plain", "plain"), step="another_method"),
        {"compile, fsdp": "equal", "compile, tensor, zero1": "equal"},
    ),
    (Recipe(blocks=("clamped", "clamped")), {"compile, ddp": "equal", "compile, fsdp": "refused"}),
    # What a loop does between the forward and the backward pass, while parameters are gathered, and with numbers and
    # functions of divided tensors.
    (Recipe(blocks=("plain", "plain"), step="zeroed_between"), {"fsdp": "equal", "zero2": "equal"}),
    (Recipe(blocks=("plain", "plain"), step="clipped_by_numbers"), {"fsdp": "equal", "tensor": "equal"}),
    (
        Recipe(blocks=("plain", "plain"), step="hooked_between"),
        dict.fromkeys(("ddp", "zero1", "fsdp", "zero2", "tensor"), "equal"),
    ),
    (
        Recipe(
            blocks=("plain", "plain"),
            step="by_hand",
            events=((1, "hook_gradients_late"), (2, "shake_weights")),
        ),
        dict.fromkeys(("ddp", "zero1", "fsdp", "zero2", "tensor"), "equal"),
    ),
    (
        Recipe(blocks=("plain", "norm"), events=((1, "shake_weights"), (2, "hook_gradients_late"))),
        {"tensor, fsdp": "equal", "tensor, ddp": "equal", "compile, fsdp": "equal"},
    ),
    (
        Recipe(blocks=("odd", "plain"), events=((1, "hook_gradients_late"), (1, "thaw"))),
        {"pipeline": "equal", "pipeline, ddp": "equal"},
    ),
    # A number without dimensions, which is not gathered and has its gradient, where the others have none.
    (
        Recipe(blocks=("plain", "scaled"), step="gradients_by_function"),
        {"ddp": "equal", "fsdp": "told", "zero2": "told"},
    ),
    # A buffer with two names.
    (
        Recipe(blocks=("scaled", "plain"), changes=("share_block",)),
        dict.fromkeys(("ddp", "fsdp", "tensor"), "equal"),
    ),
    # An optimizer that a stage's parameters are too few for.
    (Recipe(blocks=("lists", "routed"), optimizer="nested"), {"pipeline": "refused"}),
    # Norms of gradients that lie on several meshes.
    (
        Recipe(blocks=("adapted", "plain"), step="clipped_by_torch"),
        {"tensor, fsdp": "equal", "tensor, ddp": "equal"},
    ),
    # A gradient of rows, dense where a penalty is on the whole table.
    (
        Recipe(blocks=("plain", "sparse"), step="regularised_whole"),
        {"ddp": "equal", "zero1": "equal", "pipeline": "refused"},
    ),
    # Hooks of gradients are called by backward passes, and not by forward passes that none follows.
    (
        Recipe(blocks=("plain", "plain"), changes=("hook_gradients", "hook_sums"), step="probed"),
        dict.fromkeys(("ddp", "zero1", "fsdp", "zero2", "tensor"), "equal"),
    ),
    # Norms of gradients in float64, which were rounded to float32.
    (
        Recipe(blocks=("lookup", "lookup"), optimizer="rmsprop", step="clipped"),
        dict.fromkeys(("ddp", "zero2", "fsdp", "tensor"), "equal"),
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("recipe", "kinds"), FOUND)
def test_what_the_search_for_loops_has_found(recipe: Recipe, kinds: dict[str, str]) -> None:
    found = judge(recipe, list(kinds))
    assert {name: verdict.kind for name, verdict in found.items()} == kinds, found


def test_the_judge_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process that trains at another rate stands for a strategy that does."""
    wrong = {**judges.OPTIMIZERS, "sgd": (judges.OPTIMIZERS["sgd"][0], {"lr": 0.2})}
    expected = judges.reference(PLAIN)
    monkeypatch.setattr(judges, "OPTIMIZERS", wrong)
    changed = judges.reference(PLAIN)
    ranks = [("trained", (changed, [])), ("trained", ({}, []))]
    assert judges._of(ranks, expected).kind == "wrong"
    assert judges._of(ranks, changed).kind == "equal"
