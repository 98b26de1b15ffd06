from __future__ import annotations

from dataclasses import replace

from atorch_ns.search.space.equivalence import canonical
from atorch_ns.strategy import Plan

REPLICATED = Plan(axes=(("data", 4),), gradient_sync="all_reduce").changed(sharding={"bucket_bytes": 25})
SHARDED = Plan(axes=(("data", 4),), gradient_sync="reduce_scatter").changed(
    sharding={"parameters_over": ("data",), "gradients_over": ("data",), "optimizer_over": ("data",)}
)


def test_an_axis_that_nothing_is_sharded_over_is_more_data() -> None:
    assert canonical(replace(REPLICATED, axes=(("zero", 2), ("data", 2)))) == canonical(REPLICATED)


def test_sharding_over_all_ranks_is_the_same_along_either_axis() -> None:
    along_zero = SHARDED.changed(
        axes=(("zero", 4),),
        sharding={"parameters_over": ("zero",), "gradients_over": ("zero",), "optimizer_over": ("zero",)},
    )
    assert canonical(along_zero) == canonical(SHARDED)


def test_sharding_within_groups_is_something_of_its_own() -> None:
    hybrid = SHARDED.changed(
        axes=(("zero", 2), ("data", 2)),
        sharding={"parameters_over": ("zero",), "gradients_over": ("zero",), "optimizer_over": ("zero",)},
    )
    assert canonical(hybrid) != canonical(SHARDED)


def test_on_one_rank_nothing_is_sharded_or_synchronised() -> None:
    one = (("data", 1),)
    assert canonical(SHARDED.changed(axes=one, sharding={"keeps_gathered": True, "units": ()})) == canonical(
        Plan()
    )
    assert canonical(replace(REPLICATED, axes=one)) == canonical(Plan())


def test_settings_without_effect_are_taken_out() -> None:
    assert canonical(Plan().changed(recomputation={"every": 2})) == Plan()
    assert canonical(REPLICATED.changed(sharding={"units": (), "keeps_gathered": True})) == canonical(
        REPLICATED
    )


def test_what_changes_something_stays() -> None:
    for change in (
        {"recomputation": {"kind": "blocks"}},
        {"precision": {"compute_dtype": "bfloat16"}},
        {"num_micro_batches": 2},
        {"compiled": True},
        {"sharding": {"keeps_gathered": True}},
    ):
        assert canonical(SHARDED.changed(**change)) != canonical(SHARDED), change


def test_ranks_along_sequence_alone_shard_states_too() -> None:
    along = {"axes": (("sequence", 4),), "sequence": {"parallel_loss": True}}
    axes = Plan(axes=(("sequence", 4),)).unit_axes
    over = dict.fromkeys(("parameters_over", "gradients_over", "optimizer_over"), axes)
    sharded = canonical(SHARDED.changed(**along, sharding=over))
    assert sharded.gradient_sync == "reduce_scatter"
    assert sharded.sharding.parameters_over == ("sequence",)
