"""Probes of devices (products, attention, element-wise operators, starts) and links (rates, overlap)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from atorch_ns.cluster.hardware import Rate

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_DTYPES: Final = ("float32", "bfloat16", "float16")
# (rows, inner, columns): a feed-forward layer of a small model, a square, a head.
_PRODUCTS: Final = {"cpu": ((256, 256, 1024), (384, 384, 384), (128, 512, 2048)),
                    "cuda": ((4096, 4096, 4096), (8192, 2048, 8192), (2048, 8192, 2048))}  # fmt: skip
# Without AVX-512 FP16, products in fp16 are a hundred times slower than others: small ones tell it as well.
_FAST: Final = {"cpu": ("float32", "bfloat16"), "cuda": _DTYPES}
_SMALL_PRODUCTS: Final = ((64, 128, 128),)
_SQUARES: Final = {"cpu": (64, 128, 256, 512), "cuda": (512, 1024, 2048, 4096, 8192)}
# (batch, heads, tokens, size of a head)
_ATTENTION: Final = {"cpu": ((2, 4, 128, 64), (1, 4, 512, 64)),
                     "cuda": ((16, 16, 1024, 128), (4, 16, 4096, 128), (1, 16, 16384, 128))}  # fmt: skip
_ELEMENTS: Final = {"cpu": 2**18, "cuda": 2**24}  # per tensor
_NUM_TENSORS: Final = 16  # in one timed run
_MIN_SECONDS: Final = 0.004  # minimum duration of a timing
_OPERATOR_CHAIN: Final = 6  # blocks of four layers


@dataclass(frozen=True, kw_only=True)
class ComputeSpeed:
    """Measured speed of one device.

    Attributes:
        flops_per_s: FLOP/s of products by dtype.
        memory_bytes_per_s, in_place_bytes_per_s, launch_s: as in :class:`Device`.
    """

    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    in_place_bytes_per_s: float
    launch_s: float


def compute_probes(device: str, *, by_size: bool = False) -> dict[str, Callable[[], float]]:
    """The probes to time, by a name that :func:`compute_speed` reads. Omits dtypes that the device lacks.

    Args:
        device: the device, as torch writes it.
        by_size: whether to time square products by dtype and size too, and causal attention of several sizes.
    """
    kind = device.partition(":")[0]
    probes: dict[str, Callable[[], float]] = {}
    for dtype in _DTYPES:
        for shape in _PRODUCTS[kind] if dtype in _FAST[kind] else _SMALL_PRODUCTS:
            probe = _product_probe(device, dtype, shape)
            if probe is not None:
                probes[f"product/{dtype}/{'x'.join(map(str, shape))}"] = probe
    probes |= dict(_element_wise(device, _ELEMENTS[kind]))
    layers, operators = _small_layers(device)
    probes[f"operators/{operators}"] = make_probe(layers, device)
    probes |= dict(_attention_probes(device, kind, _ATTENTION[kind] if by_size else _ATTENTION[kind][:1]))
    return probes | (dict(_square_products(device, kind)) if by_size else {})


def _square_products(device: str, kind: str) -> Iterator[tuple[str, Callable[[], float]]]:
    for dtype in _FAST[kind]:
        for size in _SQUARES[kind]:
            probe = _product_probe(device, dtype, (size, size, size))
            if probe is not None:
                yield f"square/{dtype}/{size}x{size}x{size}", probe


def _attention_probes(
    device: str, kind: str, shapes: Sequence[tuple[int, int, int, int]]
) -> Iterator[tuple[str, Callable[[], float]]]:
    for dtype in _FAST[kind]:
        for shape in shapes:
            name = f"{dtype}/{'x'.join(map(str, shape))}"
            try:
                forward, training = _causal_attention_probes(device, dtype, shape)
            except (RuntimeError, NotImplementedError):  # no attention of that dtype, or no memory for it
                continue
            yield f"attention/{name}", forward
            yield f"attention_training/{name}", training


def _causal_attention_probes(
    device: str, dtype: str, shape: tuple[int, int, int, int]
) -> tuple[Callable[[], float], Callable[[], float]]:
    import torch
    import torch.nn.functional as F

    query, key, value = (_noise_of(shape, dtype, device).requires_grad_() for _ in range(3))

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def without_graph() -> None:
        with torch.no_grad():
            forward()

    def training() -> None:
        torch.autograd.grad(forward().sum(), (query, key, value))

    training()  # raises here if there is no such kernel
    return make_probe(without_graph, device), make_probe(training, device)


def probe_flops(name: str) -> float:
    """FLOPs of one run of a probe of products or attention, by its name; 0 for others.

    A product of m x k by k x n has 2mkn. Causal attention of B samples, H heads of size D and T tokens has
    half of 4BHT²D forward, and 3.5 times that with the backward pass: five products, one of them recomputed.
    """
    what, *rest = name.split("/")
    if what in ("product", "square"):
        return 2.0 * math.prod(map(int, rest[1].split("x")))
    if what.startswith("attention"):
        batch, heads, tokens, size = map(int, rest[1].split("x"))
        return 2.0 * batch * heads * tokens**2 * size * (3.5 if what == "attention_training" else 1)
    return 0.0


def compute_speed(times: Mapping[str, float], *, on_gpu: bool = False) -> ComputeSpeed:
    """Computes the device speed from the probes' median seconds.

    Args:
        times: seconds by the probe's name.
        on_gpu: whether a GPU ran them. There starts of operators hide behind earlier ones, and a product's
            rate is the best shape's, since estimates price the loss of other shapes as the bytes of their
            operands. On a CPU the start is taken off, and the rate is the median of the usual layers.
    """
    launch = next(
        seconds / int(name.split("/")[1]) for name, seconds in times.items() if name.startswith("operators/")
    )
    rates: dict[str, list[float]] = {}
    traffic: dict[str, list[float]] = {"elements": [0.0, 0.0], "in_place": [0.0, 0.0]}
    for name, seconds in times.items():
        what, *rest = name.split("/")
        # A bare operator costs less than one in a module under autograd: about a third.
        net = seconds if on_gpu else max(seconds - launch / 3, seconds / 10)
        if what == "product" or (on_gpu and what == "square"):
            rates.setdefault(rest[0], []).append(probe_flops(name) / net)
        elif what in traffic:
            traffic[what][0] += float(rest[1])
            traffic[what][1] += net
    return ComputeSpeed(
        flops_per_s={
            dtype: float(max(values) if on_gpu else np.median(values)) for dtype, values in rates.items()
        },
        memory_bytes_per_s=traffic["elements"][0] / traffic["elements"][1],
        in_place_bytes_per_s=traffic["in_place"][0] / traffic["in_place"][1],
        launch_s=launch,
    )


def make_probe(action: Callable[[], Any], device: str) -> Callable[[], float]:
    """A probe that repeats ``action`` for a few milliseconds and returns the seconds of one run."""

    def probe() -> float:
        repeats, seconds = 1, 0.0
        while True:
            wait_for(device)
            began = time.perf_counter()
            for _ in range(repeats):
                action()
            wait_for(device)
            seconds = time.perf_counter() - began
            if seconds >= _MIN_SECONDS or repeats >= 1024:
                return seconds / repeats
            repeats = min(1024, max(2 * repeats, int(repeats * _MIN_SECONDS / max(seconds, 1e-7)) + 1))

    return probe


def wait_for(device: str) -> None:
    """Waits until a GPU has finished its queued work."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def _product_probe(device: str, dtype: str, shape: tuple[int, int, int]) -> Callable[[], float] | None:
    import torch

    rows, inner, columns = shape
    try:
        left, right = _noise_of((rows, inner), dtype, device), _noise_of((inner, columns), dtype, device)
        torch.mm(left[:1], right)
    except (RuntimeError, NotImplementedError):  # the device has no such product
        return None
    return make_probe(lambda: torch.mm(left, right), device)


def _noise_of(shape: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
    import torch

    # Not constant: on constants a GPU needs less power, and is faster than in training.
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).to(getattr(torch, dtype))


def _element_wise(device: str, num_elements: int) -> Iterator[tuple[str, Callable[[], float]]]:
    import torch
    import torch.nn.functional as F

    # Results are kept until all tensors are done, as in a forward pass: on a CPU fresh memory costs most, and
    # memory that was just given back would hide it.
    tensors = [torch.linspace(-1, 1, num_elements, device=device).view(-1, 256) for _ in range(_NUM_TENSORS)]
    other, weight = tensors[0].clone(), torch.ones(256, device=device)
    size = num_elements * 4 * _NUM_TENSORS  # bytes of all tensors
    fresh: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
        "copy": (2 * size, torch.clone),  # (bytes read and written, action)
        "add": (3 * size, lambda tensor: tensor + other),
        "multiply": (3 * size, lambda tensor: tensor * other),
        "silu": (2 * size, F.silu),
        "softmax": (2 * size, lambda tensor: torch.softmax(tensor, -1)),
        "norm": (2 * size, lambda tensor: F.layer_norm(tensor, (256,), weight, weight)),
        "cast": (size + size // 2, torch.Tensor.bfloat16),
    }
    in_place: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
        "add": (3 * size, lambda tensor: tensor.add_(other)),
        "scale": (2 * size, lambda tensor: tensor.mul_(0.5)),
    }
    for kind, actions in (("elements", fresh), ("in_place", in_place)):
        for name, (num_bytes, action) in actions.items():
            yield f"{kind}/{name}/{num_bytes}", make_probe(partial(_on_all, action, tensors), device)


def _on_all(
    action: Callable[[torch.Tensor], torch.Tensor], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    return [action(tensor) for tensor in tensors]


def _small_layers(device: str) -> tuple[Callable[[], None], int]:
    import torch
    from torch import nn

    from atorch_ns.torch_compat import count_operators

    with torch.random.fork_rng(devices=[]):
        blocks: list[nn.Module] = []
        for _ in range(_OPERATOR_CHAIN):
            blocks += [nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)]
        model = nn.Sequential(*blocks).to(device)
    inputs = torch.ones(2, 8, device=device)  # so small that only launches take time

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(inputs).sum().backward()

    return run, count_operators(run)


RING_STEPS: Final[Mapping[str, int]] = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "broadcast": 1,
    "reduce": 1,
    "all_to_all": 1,
    "send": 1,
}
"""Number of times that a ring passes the tensor around: in a ring of n ranks each sends this many times n - 1
messages of 1/n of the tensor."""

_MEASURED: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_NUM_BYTES: Final = {"cpu": (2**12, 2**17, 2**20, 2**22), "cuda": (2**14, 2**20, 2**24, 2**27)}
_REPEATS: Final = {"cpu": (4, 3, 2, 2), "cuda": (10, 5, 3, 2)}  # one for each size
_OVERLAP_BYTES: Final = {"cpu": 2**22, "cuda": 2**27}


def link_probes(
    group: dist.ProcessGroup, device: str, *, sends: bool = False
) -> dict[str, Callable[[], float]]:
    """The link probes to time, by a name that :func:`fit_rates` and :func:`measured_overlap` read.

    Args:
        group: the ranks on the link.
        device: this rank's device.
        sends: whether sends are timed too, from each rank to the next, all at once.
    """
    kind = device.partition(":")[0]
    probes: dict[str, Callable[[], float]] = {}
    for collective in (*_MEASURED, *(["send"] if sends else [])):
        for num_bytes, repeats in zip(_NUM_BYTES[kind], _REPEATS[kind], strict=True):
            start = _collective_starter(collective, num_bytes, group, device)
            if start is not None:
                probes[f"{collective}/{num_bytes}"] = _timed_together(start, repeats, group, device)
    return probes | _overlap_probes(_OVERLAP_BYTES[kind], group, device)


def fit_rates(times: Mapping[str, float], num_ranks: int) -> dict[str, Rate]:
    """α and β of every collective by least squares over its sizes, each error relative to its time.

    Args:
        times: median seconds by ``"<collective>/<bytes>"``; other names are passed over.
        num_ranks: ranks of the ring.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for name, seconds in times.items():
        collective, _, num_bytes = name.partition("/")
        if collective in RING_STEPS and num_bytes.isdecimal():
            points.setdefault(collective, []).append((float(num_bytes), seconds))
    return {name: _fit_rate(*messages_of(name, num_ranks), samples) for name, samples in points.items()}


def messages_of(collective: str, num_ranks: int) -> tuple[int, int]:
    """The number of messages that a rank sends in sequence, and the number of tensor parts for them."""
    if collective == "send":
        return 1, 1
    return RING_STEPS[collective] * (num_ranks - 1), num_ranks


def measured_overlap(times: Mapping[str, float]) -> float:
    """Share of a collective's time that ran beside a computation of about its length: 0 to 1."""
    alone, computing, both = (times[f"overlap/{what}"] for what in ("alone", "computing", "both"))
    # 1 where both together take as long as the longer one, 0 where they take as long as the sum.
    return float(np.clip((alone + computing - both) / min(alone, computing), 0.0, 1.0))


def _fit_rate(messages: int, num_parts: int, points: list[tuple[float, float]]) -> Rate:
    sizes, seconds = (np.asarray(values) for values in zip(*points, strict=True))
    # seconds = α · messages + β · messages · bytes / parts; each equation is divided by its seconds.
    columns = np.stack([np.full(len(sizes), messages), messages * sizes / num_parts], axis=1)
    weights = 1 / seconds
    solution, *_ = np.linalg.lstsq(columns * weights[:, None], np.ones(len(sizes)), rcond=None)
    # Noise can make either negative; no message is free, and none is faster than the largest that was seen.
    latency = max(float(solution[0]), 0.1 * float(seconds.min()) / messages)
    slowest = 0.2 * float(seconds[-1]) / (messages * float(sizes[-1]) / num_parts)
    return Rate(latency, 1 / max(float(solution[1]), slowest))


def _collective_starter(
    collective: str, num_bytes: int, group: dist.ProcessGroup, device: str
) -> Callable[[bool], Any] | None:
    import torch
    import torch.distributed as dist

    num_ranks = dist.get_world_size(group)
    each = max(1, num_bytes // 4 // num_ranks)  # float32 elements of one part
    whole, part = torch.zeros(each * num_ranks, device=device), torch.zeros(each, device=device)
    other = torch.zeros_like(whole)
    ranks = dist.get_process_group_ranks(group)
    at = dist.get_rank(group)
    # torch 2.13 gave these two shorter names; the old ones warn.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def shift(later: bool) -> None:
        send_op = dist.P2POp(dist.isend, whole, ranks[(at + 1) % num_ranks], group=group)
        receive_op = dist.P2POp(dist.irecv, other, ranks[at - 1], group=group)
        for work in dist.batch_isend_irecv([send_op, receive_op]):
            work.wait()

    starters: dict[str, Callable[[bool], Any]] = {
        "all_reduce": lambda later: dist.all_reduce(whole, group=group, async_op=later),
        "all_gather": lambda later: gather(whole, part, group=group, async_op=later),
        "reduce_scatter": lambda later: scatter(part, whole, group=group, async_op=later),
        "broadcast": lambda later: dist.broadcast(whole, src=ranks[0], group=group, async_op=later),
        "all_to_all": lambda later: dist.all_to_all_single(other, whole, group=group, async_op=later),
        "send": shift,
    }
    start = starters[collective]
    try:
        start(False)
    except (RuntimeError, NotImplementedError):  # on every rank alike: the backend lacks it
        if collective == "all_reduce":  # every backend has it: a rank is gone
            raise
        return None  # unsupported by the backend
    return start


def _timed_together(
    start: Callable[[bool], Any], repeats: int, group: dist.ProcessGroup, device: str
) -> Callable[[], float]:
    import torch.distributed as dist

    def probe() -> float:
        dist.barrier(group=group)
        wait_for(device)
        began = time.perf_counter()
        for _ in range(repeats):
            start(False)
        wait_for(device)
        return (time.perf_counter() - began) / repeats

    return probe


def _overlap_probes(num_bytes: int, group: dist.ProcessGroup, device: str) -> dict[str, Callable[[], float]]:
    import torch
    import torch.distributed as dist

    communicate = _collective_starter("all_reduce", num_bytes, group, device)
    assert communicate is not None
    size = 256 if device == "cpu" else 2048
    left = torch.ones(size, size, device=device)
    alone = _timed_together(communicate, 2, group, device)
    for _ in range(2):  # the first run warms up
        seconds = alone()
    began = time.perf_counter()
    for _ in range(4):
        torch.mm(left, left)
    wait_for(device)
    # Enough products to take about as long as the collective; all ranks use the same number.
    products = torch.tensor([seconds / max((time.perf_counter() - began) / 4, 1e-7)], device=device)
    dist.all_reduce(products, op=dist.ReduceOp.MIN, group=group)
    repeats = int(np.clip(float(products), 1, 1000))

    def compute(later: bool) -> None:
        for _ in range(repeats):
            torch.mm(left, left)

    def both(later: bool) -> None:
        work = communicate(True)
        compute(False)
        work.wait()

    return {
        "overlap/alone": alone,
        "overlap/computing": _timed_together(compute, 2, group, device),
        "overlap/both": _timed_together(both, 2, group, device),
    }
