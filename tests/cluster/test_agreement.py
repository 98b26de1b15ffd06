"""Agreement of ranks, with the other ranks' answers given by hand."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns import auto_accelerate
from atorch_ns.cluster import (
    Cluster,
    agree,
    agreement,
    from_first,
    gather_values,
    same_everywhere,
    sharing_failures,
)
from atorch_ns.errors import InputError, RankError
from atorch_ns.testing import catch_ranks, run_ranks


def _raise() -> int:
    raise OSError("the disk is full")


def _others_answer(monkeypatch: pytest.MonkeyPatch, *answers: Any, ranks: list[int]) -> None:
    """This process is the first rank of a group of ``ranks``; the others answer ``answers``."""
    monkeypatch.setattr(agreement, "gather_values", lambda value, **_: [value, *answers])
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: ranks)


class _Unwritable:
    def __reduce__(self) -> Any:
        raise RuntimeError("it has no storage")


def test_a_value_that_cannot_be_sent_is_no_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(values: list[Any], value: Any, group: Any) -> None:
        pickle.dumps(value)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_gather_object", lost)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [4, 5])
    with pytest.raises(
        RankError, match=r"one of the ranks 4, 5 no longer answers.*Connection closed by peer"
    ):
        gather_values(1, distributed=True)
    with pytest.raises(RuntimeError, match="it has no storage") as caught:
        gather_values(_Unwritable(), distributed=True)
    assert not isinstance(caught.value, RankError)


class _Unreadable:
    """Pickles, and fails where it is made again, as tensors of uint16 do in torch 2.13."""

    def __reduce__(self) -> Any:
        return _fails, ()


def _fails() -> None:
    raise AttributeError("it has no dtype")


def _sent() -> tuple[list[str], int]:
    found = []
    for value in (_Unwritable(), [_Unreadable()]):
        try:
            from_first(value if dist.get_rank() == 0 else None, distributed=True)
        except InputError as error:
            found.append(str(error))
    return found, from_first(dist.get_rank() + 5, distributed=True)


def test_what_others_cannot_read_is_refused_on_all_ranks() -> None:
    """Where the readers failed alone, they went on to another exchange than the first rank."""
    first, second = run_ranks(_sent, 2)
    assert first == second
    (unwritable, unreadable), number = first
    assert "which does not pickle: RuntimeError: it has no storage" in unwritable
    assert "a list, which does not pickle: AttributeError: it has no dtype" in unreadable
    assert number == 5


def test_one_process_agrees_with_itself() -> None:
    assert agree(lambda: None, what="nothing", distributed=False) is None
    assert Cluster().on_first(lambda: 3, what="counting") == 3
    assert from_first("text", distributed=False) == "text"
    assert gather_values("text", distributed=False) == ["text"]
    same_everywhere({"model": "a"}, distributed=False)
    with pytest.raises(OSError, match="the disk is full"):
        agree(_raise, what="writing", distributed=False)


def test_a_failure_elsewhere_is_named_by_the_number_that_the_rank_has_in_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _others_answer(monkeypatch, None, "OSError: the disk is full", ranks=[4, 5, 6])
    with pytest.raises(RankError, match=r"writing failed on 1 other rank.*\n  rank 6: OSError") as caught:
        agree(lambda: None, what="writing", distributed=True)
    assert caught.value.failures == {6: "OSError: the disk is full"}


def test_a_rank_that_fails_itself_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _others_answer(monkeypatch, "ValueError: another", ranks=[0, 1])
    with pytest.raises(OSError, match="the disk is full"):
        agree(_raise, what="writing", distributed=True)


def test_many_failures_are_counted_and_the_first_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    _others_answer(monkeypatch, *["OSError: full"] * 11, ranks=list(range(12)))
    with pytest.raises(RankError, match="on 11 other") as caught:
        agree(lambda: None, what="writing", distributed=True)
    assert "rank 8:" in str(caught.value)
    assert "rank 9:" not in str(caught.value)
    assert "and 3 more" in str(caught.value)


def test_arguments_that_differ_are_named_with_who_holds_which(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"strategy": "fsdp", "seed": "1"}
    _others_answer(monkeypatch, own, {"strategy": "ddp" * 200, "seed": "1"}, ranks=[0, 1, 2])
    with pytest.raises(
        RankError, match=r"strategy: ranks \[0, 1\] have fsdp; ranks \[2\] have ddp.*\.\.\.$"
    ) as caught:
        same_everywhere(own, distributed=True)
    assert "seed" not in str(caught.value)
    _others_answer(monkeypatch, own, ranks=[0, 1])
    same_everywhere(own, distributed=True)


def _fail_twice() -> None:
    with pytest.raises(ValueError, match="both"), sharing_failures("the first", distributed=True):
        raise ValueError("both ranks")
    with sharing_failures("the second", distributed=True):
        if dist.get_rank() == 1:
            raise OSError("the disk is full")
        dist.barrier()


def test_a_rank_that_fails_while_others_communicate_is_named_with_its_reason() -> None:
    """Not with what a rank said when an earlier block failed."""
    waiting, failed = catch_ranks(_fail_twice, 2)
    assert failed.describe().rstrip().endswith("OSError: the disk is full")
    assert (
        "RankError: the second failed on 1 other rank(s), so all stopped:\n  rank 1: OSError"
        in waiting.describe()
    )


def _fail_after_the_last_exchange() -> None:
    for turn in range(1, 4):
        with sharing_failures("a step", distributed=True, turn=turn):
            dist.barrier()
            if turn > 1 and dist.get_rank() == 1:
                raise OSError(f"the disk is full in step {turn}")


def test_a_rank_that_fails_after_the_last_exchange_is_named_in_the_next_block() -> None:
    waiting, _ = catch_ranks(_fail_after_the_last_exchange, 2)
    assert (
        "RankError: a step failed on 1 other rank(s), so all stopped:\n  rank 1: OSError: the disk is full in step 2"
        in (waiting.describe())
    )


def _end_without_a_word() -> None:
    dist.barrier()  # both have the group
    with sharing_failures("the block", distributed=True):
        if dist.get_rank() == 1:
            os._exit(9)
        dist.barrier()


def test_a_rank_that_ends_without_a_word_ends_the_others_in_words() -> None:
    waiting, _ = catch_ranks(_end_without_a_word, 2)
    assert "RankError: the block lost the connection to another rank" in waiting.describe()


class _FailsLater(nn.Module):
    """On rank 1 alone, in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 2 and dist.get_rank() == 1:
            raise ZeroDivisionError("in the model")
        out: torch.Tensor = self.linear(x)
        return out


def _fail_in_a_step(strategy: str) -> None:
    _, result, _ = auto_accelerate(
        _FailsLater(), torch.optim.SGD, loss_func=lambda _, out: out.mean(), load_strategy=strategy
    )
    assert result is not None
    for _ in range(3):
        result.train_step(torch.ones(2, 4))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_rank_that_fails_in_a_step_is_named_by_the_others(strategy: str) -> None:
    waiting, failed = catch_ranks(_fail_in_a_step, 2, args=(strategy,))
    assert "ZeroDivisionError: in the model" in failed.describe()
    assert "RankError: a training step failed on 1 other rank(s)" in waiting.describe()
    assert "rank 1: ZeroDivisionError: in the model" in waiting.describe()


class _FailsOn(nn.Module):
    """In the second step, on the ranks from ``first`` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.first, self.calls = first, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 2 and dist.get_rank() >= self.first:
            raise ZeroDivisionError("in the model")
        out: torch.Tensor = self.linear(x)
        return out


def _fail_and_go_on(first: int, strategy: str) -> tuple[int, float]:
    _, result, _ = auto_accelerate(
        _FailsOn(first), torch.optim.SGD, loss_func=lambda _, out: out.mean(), load_strategy=strategy
    )
    assert result is not None
    began, failed = time.monotonic(), 0
    for _ in range(5):
        try:
            result.train_step(torch.ones(2, 4))
        except ZeroDivisionError:
            failed += 1
    return failed, time.monotonic() - began


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_rank_that_failed_alone_cannot_go_on(strategy: str) -> None:
    waiting, failed = catch_ranks(_fail_and_go_on, 2, args=(1, strategy))
    assert "a training step failed on this rank before, and not on rank(s) 0" in failed.describe()
    assert "rank 1: ZeroDivisionError: in the model" in waiting.describe()


def test_ranks_that_failed_together_go_on() -> None:
    for failed, seconds in run_ranks(_fail_and_go_on, 2, args=(0, "ddp")):
        assert failed == 1
        assert seconds < 8  # without a wait for failures that do not come


def _fail_and_go_on_blindly() -> None:
    _, result, _ = auto_accelerate(
        _FailsOn(1), torch.optim.SGD, loss_func=lambda _, out: out.mean(), load_strategy="ddp"
    )
    assert result is not None
    errors, began = [], time.monotonic()
    for _ in range(20):
        try:
            result.train_step(torch.ones(2, 4))
        except Exception as error:
            if dist.get_rank() == 0:
                raise
            errors.append(type(error).__name__)
    assert errors == ["ZeroDivisionError", *["RankError"] * 18]
    assert time.monotonic() - began < 20  # one wait, and not one for each step
    raise KeyError("the script is over")


def test_a_script_that_catches_everything_ends_all_the_same() -> None:
    waiting, over = catch_ranks(_fail_and_go_on_blindly, 2)
    assert "the script is over" in over.describe()
    assert "rank 1: ZeroDivisionError: in the model" in waiting.describe()


def _fail_together_and_then_alone() -> None:
    for turn in range(1, 4):
        with contextlib.suppress(OSError), sharing_failures("a step", distributed=True, turn=turn):
            if turn == 2:
                raise OSError("the disk is full")
            if turn == 3 and dist.get_rank() == 1:
                raise ZeroDivisionError("in the model")
            dist.barrier()


def test_failures_that_are_past_are_not_counted() -> None:
    waiting, _ = catch_ranks(_fail_together_and_then_alone, 3)[:2]
    assert "failed on 1 other rank(s), so all stopped:\n  rank 1: ZeroDivisionError" in waiting.describe()
