"""What travels between stages arrives as it was sent, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opt_lib._deepspeed.pipeline import Wire, anchor, pack, read_header, unpack

GENERATOR = torch.Generator().manual_seed(0)


def _trained(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).to(dtype).requires_grad_()


def _arrived(wire: Wire) -> Wire:
    """As the engine gives it to the next stage: copies, of which every floating one is a leaf."""
    copies = tuple(tensor.detach().clone() for tensor in wire)
    for copy in copies:
        copy.requires_grad_(copy.is_floating_point())
    return copies


PLAIN = [
    torch.tensor([True, False, True]),
    torch.tensor(7),
    torch.arange(6, dtype=torch.int32).view(2, 3),
    torch.randn(5, 3, generator=GENERATOR).t(),  # not contiguous
    torch.randn(2, generator=GENERATOR).bfloat16(),
    torch.randn(3, dtype=torch.complex64, generator=GENERATOR),
    torch.empty(0, 4),
]


@pytest.mark.parametrize(
    "sent",
    [
        [_trained(2, 3)],
        PLAIN,
        [_trained(2, 3), *PLAIN],
        [PLAIN[0], _trained(2, 3), PLAIN[1], _trained(4), _trained(2, 2, dtype=torch.float64)],
        [_trained(3, 4).t(), _trained(2, dtype=torch.bfloat16), _trained(2, dtype=torch.float16)],
        [_trained()],
        [_trained(2, 3, dtype=torch.complex64)],
        [_trained(3, 5), _trained(4, dtype=torch.complex64)],
        [_trained(2, dtype=torch.complex64).conj(), _trained(3), PLAIN[5].conj(), PLAIN[5].conj().imag],
    ],
    ids=[
        "one",
        "nothing trains",
        "one and others",
        "several",
        "dtypes",
        "a number",
        "complex",
        "odd",
        "conjugates",
    ],
)
def test_round_trip(sent: list[Tensor]) -> None:
    wire = _arrived(pack(sent))
    assert sum(tensor.is_floating_point() for tensor in wire) == any(tensor.requires_grad for tensor in sent)
    received = unpack(wire, read_header(wire))
    for one, other in zip(sent, received, strict=True):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        assert torch.equal(one.detach(), other.detach())


def test_gradients_of_several_come_back_as_one() -> None:
    sent = [_trained(2, 3), _trained(3, dtype=torch.bfloat16), _trained(2)]
    packed = pack(sent)
    wire = _arrived(packed)
    first, second, _ = unpack(wire, read_header(wire))
    (first.square().sum() + 3 * second.float().sum()).backward()
    packed[0].backward(wire[0].grad)
    assert torch.allclose(sent[0].grad, 2 * sent[0])  # type: ignore[arg-type]
    assert torch.equal(sent[1].grad, torch.full_like(sent[1], 3))  # type: ignore[arg-type]
    assert torch.equal(sent[2].grad, torch.zeros(2))  # type: ignore[arg-type]  # it was not used


def test_gradients_of_complex_tensors_come_back() -> None:
    for others in ([], [_trained(2)]):
        sent = _trained(3, dtype=torch.complex64)
        packed = pack([sent, *others])
        wire = _arrived(packed)
        unpack(wire, read_header(wire))[0].abs().square().sum().backward()
        packed[0].backward(wire[0].grad)
        torch.testing.assert_close(sent.grad, 2 * sent.detach())


def test_what_is_not_used_gets_a_gradient_of_zero() -> None:
    received, weight = _trained(2, 3), _trained(4)
    output = anchor(weight * 2, received)
    output.sum().backward()
    assert torch.equal(received.grad, torch.zeros(2, 3))  # type: ignore[arg-type]
    assert torch.equal(weight.grad, torch.full((4,), 2.0))  # type: ignore[arg-type]
