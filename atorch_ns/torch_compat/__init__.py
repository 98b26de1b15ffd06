"""Every private name of torch that this package uses, each behind one function or imported from here.

``tests/test_torch_compat.py`` fails when torch moves one of them.
"""

from torch.utils._python_dispatch import TorchDispatchMode

from atorch_ns.torch_compat.attention import FlashAttention
from atorch_ns.torch_compat.compile import (
    CpuMemoryRecord,
    compile_records,
    graph_breaks,
    leave_uncompiled,
    num_compile_failures,
    num_graphs,
    watch_compiled,
)
from atorch_ns.torch_compat.distributed import (
    after_backward,
    default_store,
    flatten_mesh,
    found_inf_tensors,
    group_timeout,
    in_backward,
    is_strided_shard,
    join_fake_group,
    local_grad_scaler,
    pipeline_orders,
    process_groups,
    reduced_parameters,
    replicate,
    unreached_parameters,
)
from atorch_ns.torch_compat.fake import (
    count_operators,
    fake_tensor_mode,
    fake_tensor_type,
    is_view,
    outside_fake_mode,
    quiet_fake_kernels,
    registered_children,
    tensor_without_storage,
    without_transforms,
)
from atorch_ns.torch_compat.modules import (
    checkpoint_wrapper,
    inner_hooks,
    is_stand_in,
    persistent_buffers,
    pipeline_unit,
    plain_name,
    stood_for,
    unwrap_checkpoint,
)
from atorch_ns.torch_compat.onednn import has_matrix_tiles, onednn_block, onednn_computes_in

__all__ = [
    "CpuMemoryRecord",
    "FlashAttention",
    "TorchDispatchMode",
    "after_backward",
    "checkpoint_wrapper",
    "compile_records",
    "count_operators",
    "default_store",
    "fake_tensor_mode",
    "fake_tensor_type",
    "flatten_mesh",
    "found_inf_tensors",
    "graph_breaks",
    "group_timeout",
    "has_matrix_tiles",
    "in_backward",
    "inner_hooks",
    "is_stand_in",
    "is_strided_shard",
    "is_view",
    "join_fake_group",
    "leave_uncompiled",
    "local_grad_scaler",
    "num_compile_failures",
    "num_graphs",
    "onednn_block",
    "onednn_computes_in",
    "outside_fake_mode",
    "persistent_buffers",
    "pipeline_orders",
    "pipeline_unit",
    "plain_name",
    "process_groups",
    "quiet_fake_kernels",
    "reduced_parameters",
    "registered_children",
    "replicate",
    "stood_for",
    "tensor_without_storage",
    "unreached_parameters",
    "unwrap_checkpoint",
    "watch_compiled",
    "without_transforms",
]
