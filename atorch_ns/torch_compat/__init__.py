"""Every private name of torch that this package uses, each behind one function or imported from here.

``tests/test_torch_compat.py`` says when torch moves one of them.
"""

from __future__ import annotations

from atorch_ns.torch_compat._attention import CpuFlashAttention, CudaFlashAttention
from atorch_ns.torch_compat._compile import (
    CompileRecord,
    compile_records,
    graph_breaks,
    leave_uncompiled,
    num_compile_failures,
    num_graphs,
    watch_compiled,
)
from atorch_ns.torch_compat._distributed import (
    flatten_mesh,
    group_timeout,
    in_backward,
    is_strided_shard,
    pipeline_orders,
    process_groups,
    replicate,
)
from atorch_ns.torch_compat._fake import (
    TorchDispatchMode,
    count_operators,
    fake_tensor_mode,
    fake_tensor_type,
    outside_fake_mode,
    quiet_fake_kernels,
    tensor_without_storage,
)
from atorch_ns.torch_compat._fsdp1 import FlatPart, fsdp1_parts, hybrid_shard_zero2
from atorch_ns.torch_compat._memory import CpuMemoryRecord
from atorch_ns.torch_compat._modules import (
    WRAPPER_PREFIXES,
    checkpoint_wrapper,
    inner_hooks,
    is_stand_in,
    persistent_buffers,
    pipeline_unit,
    plain_name,
    stood_for,
    unwrap_checkpoint,
)
from atorch_ns.torch_compat._scaler import found_inf_tensors, local_grad_scaler
from atorch_ns.torch_compat._tree import tree_leaves, tree_map_only

__all__ = [
    "WRAPPER_PREFIXES",
    "CompileRecord",
    "CpuFlashAttention",
    "CpuMemoryRecord",
    "CudaFlashAttention",
    "FlatPart",
    "TorchDispatchMode",
    "checkpoint_wrapper",
    "compile_records",
    "count_operators",
    "fake_tensor_mode",
    "fake_tensor_type",
    "flatten_mesh",
    "found_inf_tensors",
    "fsdp1_parts",
    "graph_breaks",
    "group_timeout",
    "hybrid_shard_zero2",
    "in_backward",
    "inner_hooks",
    "is_stand_in",
    "is_strided_shard",
    "leave_uncompiled",
    "local_grad_scaler",
    "num_compile_failures",
    "num_graphs",
    "outside_fake_mode",
    "persistent_buffers",
    "pipeline_orders",
    "pipeline_unit",
    "plain_name",
    "process_groups",
    "quiet_fake_kernels",
    "replicate",
    "stood_for",
    "tensor_without_storage",
    "tree_leaves",
    "tree_map_only",
    "unwrap_checkpoint",
    "watch_compiled",
]
