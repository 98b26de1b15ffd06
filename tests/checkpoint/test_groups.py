from __future__ import annotations

from typing import Any

import pytest
import torch

from atorch_ns.checkpoint.manifest import check_groups, record_groups, restore_groups
from atorch_ns.errors import CheckpointError

NAMES = [["a", "b"], ["c"]]


def groups(*options: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"params": [], "lr": 0.1, "betas": (0.9, 0.99), "foreach": None, **own} for own in options]


def test_hyperparameters_follow_the_names() -> None:
    saved = record_groups(NAMES, groups({"lr": 0.5, "initial_lr": 1.0}, {"lr": 0.25, "foreach": True}))
    here = groups({}, {"foreach": False})
    swapped = [["c"], ["b", "a"]]
    check_groups(saved, swapped, here, ordered=False)
    restore_groups(saved, swapped, here)
    assert [group["lr"] for group in here] == [0.25, 0.5]
    assert here[1]["initial_lr"] == 1.0
    assert here[0]["betas"] == (0.9, 0.99)
    assert [group["foreach"] for group in here] == [None, False]  # how, not what: this run's affair


def test_a_tensor_keeps_its_identity() -> None:
    saved = record_groups([["a"]], groups({"lr": torch.tensor(0.5), "betas": (torch.tensor(0.8), 0.99)}))
    rate, beta = torch.tensor(0.1), torch.tensor(0.9)
    here = groups({"lr": rate, "betas": (beta, 0.9)})
    restore_groups(saved, [["a"]], here)
    assert here[0]["lr"] is rate
    assert float(rate) == 0.5
    assert here[0]["betas"][0] is beta
    assert float(beta) == pytest.approx(0.8)
    assert here[0]["betas"][1] == 0.99
    plain = groups({})
    restore_groups(saved, [["a"]], plain)
    assert plain[0]["lr"] == 0.5


def test_another_cut_is_fine_if_it_loses_nothing() -> None:
    saved = record_groups(NAMES, groups({"lr": 0.5}, {"lr": 0.5}))
    here = groups({})
    check_groups(saved, [["a", "b", "c"]], here, ordered=False)
    restore_groups(saved, [["a", "b", "c"]], here)
    assert here[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("saved", "names", "here", "ordered", "said"),
    [
        (
            groups({"lr": 0.5}, {"lr": 0.2}),
            [["a", "b", "c"]],
            groups({}),
            False,
            "has under different lr: a and c",
        ),
        (
            groups({}, {}),
            [["a"], ["b", "c"]],
            groups({}, {"lr": 3.0}),
            False,
            "has under different lr: a and b",
        ),
        (groups({}, {}), [["c"], ["a", "b"]], groups({}, {}), True, "scheduler counts them"),
        (groups({}, {}), [["a", "b", "c"]], groups({}), True, r"2 parameter group\(s\) and this optimizer 1"),
        (
            groups({}, {}),
            [["a"], ["c", "d"]],
            groups({}, {}),
            False,
            r"did not train: d; without 1 that it did: b",
        ),
    ],
)
def test_a_cut_that_loses_something_is_refused(
    saved: Any, names: Any, here: Any, ordered: bool, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        check_groups(record_groups(NAMES, saved), names, here, ordered=ordered)


def test_a_hyperparameter_without_a_form_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"param_groups\[1\]\['schedule'\] is a builtins.function"):
        record_groups(NAMES, groups({}, {"schedule": lambda: 1}))
