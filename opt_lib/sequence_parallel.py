"""sequence_parallel: long samples are divided over the sequence axis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, final

import torch.distributed as dist
from pydantic import Field

from atorch_ns.capture.blocks import fingerprints
from atorch_ns.cluster import Cluster, or_refusal
from atorch_ns.data import call_model, default_prepare_input
from atorch_ns.errors import AtorchError, InputError, Problem
from atorch_ns.job import Job
from atorch_ns.method import Flag, Method, MethodConfig, ModuleSelectors, Phase
from atorch_ns.pipeline import StageModule
from atorch_ns.pipeline.run.forward_pass import CrossingPieces
from atorch_ns.profile import Profile
from atorch_ns.sharding import BlockChain, Links, SequenceSettings, join_at_first_call, join_blocks
from atorch_ns.sharding.collectives import gather_from, scatter_to
from atorch_ns.strategy import Plan
from atorch_ns.text import error_line, first_few
from atorch_ns.torch_compat import plain_name
from opt_lib._config_checks import no_blocks_problem, unmatched_problem
from opt_lib._model_axes.sample_batch import sample_batch
from opt_lib._model_axes.sequence_blocks import (
    WholeModel,
    block_runs,
    divide_tail,
    divided_tail,
    names_inside,
)
from opt_lib._sharded.units import broadcast_from_first


class SequenceParallelConfig(MethodConfig):
    """How samples are divided, and which modules run on parts of them."""

    kind: Literal["auto", "ulysses", "ring"] = Field(
        default="auto",
        description="How attention sees other ranks' positions: ulysses exchanges heads for positions, ring "
        "sends keys and values around; auto takes ulysses where the heads divide, and gathers keys and values where a block "
        "writes its attention out.",
    )
    sequence_dim: int = Field(default=1, ge=0, description="The dimension of positions in hidden states.")
    blocks: ModuleSelectors | None = Field(
        default=None,
        description="Modules that run on a part of the sequence, by class or name; null for the repeated "
        "blocks that can be divided.",
    )
    balanced: Flag = Field(
        default=True,
        description="Under a causal mask, give each rank of a ring an early and a late piece: equal work.",
    )
    parallel_loss: Flag | Literal["auto"] = Field(
        default="auto",
        description="Compute what comes after the last block, head and loss, for each rank's own positions. auto: where a "
        "test of the loss on a small batch gives the same loss and gradients, and nothing else needs whole samples.",
    )


@final
class SequenceParallel(Method[SequenceParallelConfig]):
    """Divides long samples over the sequence axis."""

    name = "sequence_parallel"
    aliases = ("context_parallel",)
    phase = Phase.SHARD_SAMPLES
    Config = SequenceParallelConfig
    provides = ("axis:sequence",)
    default_for = "axis:sequence"
    variants = MappingProxyType({"ring": {"kind": "ring"}})
    needs_process_group = True
    refuses_by = ()

    def check(
        self, config: SequenceParallelConfig, cluster: Cluster, profile: Profile | None
    ) -> list[Problem]:
        """There must be blocks, and those that are named must exist."""
        if config.blocks is None:
            return no_blocks_problem(self.name, "blocks", "run on parts of the sequence", profile)
        return unmatched_problem(self.name, "blocks", config.blocks, profile)

    def plan(self, plan: Plan, config: SequenceParallelConfig) -> Plan:
        """Blocks see parts of samples; ``auto`` is taken to be Ulysses, which it is where heads divide."""
        exchange: Literal["ulysses", "ring"] = "ring" if config.kind == "ring" else "ulysses"
        divides = config.parallel_loss is not False
        return plan.changed(
            sequence={"exchange": exchange, "blocks": config.blocks, "parallel_loss": divides}
        )

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[SequenceParallelConfig]:
        """Heads against positions, where heads divide, and keys and values around a ring."""
        if cluster.world_size == 1 or profile.trace is None:
            return
        yield SequenceParallelConfig()
        if any(segment.is_block and segment.num_attentions for segment in profile.trace.segments):
            yield SequenceParallelConfig(kind="ring")

    def apply(self, job: Job, config: SequenceParallelConfig) -> None:
        """Surrounds the blocks. Collective."""
        assert job.mesh is not None
        if job.mesh.size("sequence") == 1:
            job.explain(self.name, "nothing is divided: parallel_mode has no axis sequence")
            return
        group = job.mesh.axis("sequence").get_group()
        runs = job.cluster.agree(lambda: block_runs(job, config.blocks), what="finding blocks to divide")
        broadcast_from_first(job, (*job.module.parameters(), *job.module.buffers()), group=group)
        settings = SequenceSettings(
            group=group,
            device=job.device,
            dim=config.sequence_dim,
            kind=config.kind,
            balanced=config.balanced,
            head_share=job.mesh.size("tensor"),
            restore_precision=job.precision.restore,
            leave_whole=config.blocks is None and not job.parts.stages,
        )
        # Data ranks would take other samples, and one decision is for all.
        sample, why = job.cluster.from_first(_take_sample(job) if dist.get_rank() == 0 else None)
        whole = WholeModel.of(job, config.blocks, sample)
        find = partial(divided_tail, job, whole, why, dim=config.sequence_dim, request=config.parallel_loss)
        tail = job.cluster.on_first(lambda: or_refusal(find), what="testing the loss on parts of samples")
        if isinstance(tail, InputError):
            raise tail
        # Blocks with one fingerprint share the findings about their calls.
        kinds = fingerprints({block.name: block.module for blocks in runs for block in blocks})
        chains = [BlockChain(blocks, [kinds[block.name] for block in blocks], settings) for blocks in runs]
        for run in chains:
            run.attach()
        job.gradients.sums.add(names_inside(runs) | tail.parameters, group, mean=True)
        # A stage cannot be run by itself: the model from before the cut shows which blocks can be joined.
        if job.parts.stages:
            later = ""
            _send_pieces(job, group, config.sequence_dim)
            _join_stages(job, chains, partial(whole.links, config.sequence_dim))
        else:
            later = _join_early(job, chains, settings, sample, why=why)
        for run in chains:
            run.divide_head(job.module)
        note = divide_tail(job, tail, whole.blocks[-1], chains) if tail.divides else tail.note
        if later:
            join_at_first_call(job.module, chains, settings)
        job.explain(self.name, partial(_describe_division, job, config, chains, later))
        job.explain(self.name, note)


def _send_pieces(job: Job, group: dist.ProcessGroup, dim: int) -> None:
    # Hidden states between blocks are equal on all ranks of the group: each sends a piece over a cut.
    pieces = CrossingPieces(
        dim=dim,
        num_ranks=group.size(),
        divide=partial(scatter_to, dim=dim, group=group),
        join=partial(gather_from, dim=dim, group=group),
    )
    for stage in job.parts.stages:
        if isinstance(stage, StageModule):
            stage.pieces = pieces


def _join_early(
    job: Job, runs: list[BlockChain], settings: SequenceSettings, sample: Any, *, why: str
) -> str:
    """Joins blocks by a pass of two samples. Returns why the first batch must do it, or "". Collective."""
    devices = {tensor.device.type for tensor in (*job.module.parameters(), *job.module.buffers())}
    if devices != {job.device.type}:
        return f"the model is not on {job.device.type} yet"
    if why:
        return why
    try:
        batch = default_prepare_input(sample, job.device)
        # Now, so that a block that cannot be divided is refused before training.
        join_blocks(
            job.module, runs, settings, lambda: call_model(job.module, batch, job.inputs.model_input_format)
        )
    except AtorchError:
        raise
    except Exception as error:  # of the user's model; the first step shows it where it comes
        return f"two samples did not run ({error_line(error)})"
    return ""


def _join_stages(job: Job, runs: list[BlockChain], find: Callable[[], dict[tuple[str, str], Links]]) -> None:
    # One rank studies the model, without memory; all ranks raise its refusal.
    links = job.cluster.on_first(lambda: or_refusal(find), what="finding blocks that can be joined")
    if isinstance(links, InputError):
        raise links
    for run in runs:
        names = [plain_name(block.name) for block in run.blocks]
        pairs = enumerate(itertools.pairwise(names))
        run.join({index: links[pair] for index, pair in pairs if pair in links})


def _take_sample(job: Job) -> tuple[Any, str]:
    try:
        batch = sample_batch(job.inputs)
    except Exception as error:  # of the user's dataset or functions, as above
        return None, f"two samples could not be taken ({error_line(error)})"
    return batch, "there is no batch to look at" if batch is None else ""


def _describe_division(job: Job, config: SequenceParallelConfig, runs: list[BlockChain], later: str) -> str:
    assert job.mesh is not None
    whole = {name: why for run in runs for name, why in run.left_whole().items()}
    count = sum(len(run.blocks) for run in runs) - len(whole)
    kinds = sorted({plan.kind for run in runs for plan in run.plans().values()})
    because = f", since {later}" if later else ""
    attention = " and ".join(kinds) or f"{config.kind}, settled with the first batch{because}"
    text = f"{count} block(s) on 1/{job.mesh.size('sequence')} of each sequence, attention by {attention}"
    if not kinds and not job.parts.stages:
        return text
    num = sum(run.num_joined for run in runs)
    text = f"{text}; hidden states stay divided after {num} block(s); the code between the others sees them whole"
    if not whole:
        return text
    return f"{text}; {first_few(list(whole), 3)} run whole on every rank: {next(iter(whole.values()))}"
