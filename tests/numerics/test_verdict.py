"""Verdicts: tolerances, the state of every parameter, and losses that are no mean over samples."""

from __future__ import annotations

import torch

from atorch_ns.numerics.reference import Deviation, Reference, measure
from atorch_ns.numerics.verdict import TOLERANCE, ParameterVerdict, Verification, judge, judge_parts


def test_the_verdict_on_each_parameter() -> None:
    first = Deviation(errors={"a": 1e-5, "b": 1e-3, "c": 0.0, "d": 0.0}, loss_error=0.0)
    last = Deviation(errors={"a": 1e-5, "b": 0.0, "c": 0.1, "d": 0.0}, loss_error=1e-3, missing=("e",))
    rows, tolerance, reasons = judge(first, last, first_noise=None, last_noise=None, differing=("f",))
    assert [(row.name, row.state) for row in rows] == [
        ("c", "drifts"),
        ("b", "drifts"),
        ("a", "ok"),
        ("d", "ok"),
    ]
    assert tolerance == 1e-4
    assert len(reasons) == 4
    noise = Deviation(errors={"b": 0.3, "c": 0.05}, loss_error=0.0)
    rows, _, reasons = judge(first, last, first_noise=noise, last_noise=noise, differing=())
    assert {row.name: row.state for row in rows} == {"a": "ok", "b": "not judged", "c": "ok", "d": "ok"}


def test_a_missing_number_is_never_within_tolerance() -> None:
    nan = Deviation(errors={"a": float("inf")}, loss_error=float("inf"))
    rows, _, reasons = judge(nan, nan, first_noise=None, last_noise=None, differing=())
    assert rows[0].state == "drifts"
    assert len(reasons) == 2


def test_a_run_in_which_rounding_hides_everything_does_not_pass() -> None:
    noise = Deviation(errors={"a": 0.5}, loss_error=0.0)
    _, _, reasons = judge(noise, noise, first_noise=noise, last_noise=noise, differing=())
    assert reasons == ["rounding alone changes every parameter by more than its update does"]


def _run(final: float, loss: float) -> Reference:
    return Reference(
        final={"w": torch.full((2,), final)},
        updates={"w": final},
        losses=(loss,),
        learning_rate=0.1,
        training=False,
    )


def test_a_sum_over_samples_is_told_from_a_mean() -> None:
    assert judge_parts(_run(1.0, 0.5), _run(1.0, 0.5), None) is None
    reason = judge_parts(_run(1.0, 0.5), _run(2.0, 1.0), None)
    assert reason is not None
    assert reason.startswith(
        "the loss is not a mean over samples: one pass over the whole batch gives 1.000000"
    )
    assert "0.500000, and gradients differ by 1.0e+00" in reason


def test_a_deviation_names_what_is_gone() -> None:
    found = measure(_run(1.0, 0.5), {}, [float("nan")])
    assert (found.errors, found.missing, found.loss_error) == ({}, ("w",), float("inf"))


def test_a_verification_as_plain_values() -> None:
    row = ParameterVerdict(
        name="w", gradient_error=1e-3, parameter_error=0.0, gradient_tolerance=TOLERANCE,
        parameter_tolerance=TOLERANCE, state="not judged",
    )  # fmt: skip
    assert row.excess == 1e-3 / TOLERANCE
    found = Verification(
        strategy="ddp", world_size=2, num_steps=1, num_samples=4, passed=True, reasons=(), losses=((1.0, 1.0),),
        loss_error=0.0, loss_tolerance=1e-4, parameters=(row,), reduced_precision=False, training=False,
    )  # fmt: skip
    document = found.as_json()
    assert (document["schema"], document["num_judged"], document["world_size"]) == (1, 0, 2)
    assert document["parameters"][0]["name"] == "w"
