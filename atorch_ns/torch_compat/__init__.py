"""Every private name of torch that this package uses, each behind one function or imported from here.

``tests/test_torch_compat.py`` fails when torch moves one of them.
"""

from torch.utils._python_dispatch import TorchDispatchMode

from atorch_ns.torch_compat.compile import (
    CpuMemoryRecord,
    compile_forward,
    compile_records,
    graph_breaks,
    leave_uncompiled,
    micro_pipelined,
    note_inner_hooks,
    num_compile_failures,
    num_graphs,
    traced_modules,
)
from atorch_ns.torch_compat.distributed import (
    BACKWARD_FUNCTION,
    OPERATOR_CALLS,
    accumulate_after_backward,
    after_accumulation,
    after_backward,
    before_accumulation,
    begin_root,
    default_store,
    flatten_mesh,
    found_inf_tensors,
    functional_all_gather,
    functional_maximum,
    functional_reduce_scatter,
    group_named,
    group_timeout,
    in_backward,
    is_strided_shard,
    join_fake_group,
    local_box,
    local_grad_scaler,
    pipeline_orders,
    process_groups,
    reduce_after_backward,
    reduced_parameters,
    replicate,
    send_parts,
    share_memory_along,
    show_gathered,
    show_shards,
    unreached_parameters,
    visit_first,
    zero_redundancy_of_parts,
)
from atorch_ns.torch_compat.divided_tensors import (
    NO_SECOND_DERIVATIVE,
    extend_dtensor_operators,
    laid_out,
    observe_gathering,
)
from atorch_ns.torch_compat.dtensor_rules import dtensor_rules
from atorch_ns.torch_compat.fake import (
    DropoutOfGpus,
    count_operators,
    exporting_fake_mode,
    fake_tensor_mode,
    fake_tensor_type,
    gpu_described,
    is_transformed,
    is_view,
    outside_fake_mode,
    quiet_fake_kernels,
    registered_children,
    sample_size,
    tensor_without_storage,
    without_transforms,
)
from atorch_ns.torch_compat.kernels import FlashAttention, has_matrix_tiles, onednn_block, onednn_computes_in
from atorch_ns.torch_compat.modules import (
    HookTable,
    SetsInside,
    TakenHook,
    checkpoint_wrapper,
    has_gradient_hooks,
    has_step_hooks,
    has_user_hooks,
    hook_tables,
    inner_hooks,
    is_stand_in,
    persistent_buffers,
    pipeline_unit,
    plain_name,
    refusing_autograd_functions,
    step_hooks,
    stood_for,
    take_hooks,
    unwrap_checkpoint,
)

__all__ = [
    "BACKWARD_FUNCTION", "NO_SECOND_DERIVATIVE", "OPERATOR_CALLS", "CpuMemoryRecord", "DropoutOfGpus", "FlashAttention", "HookTable",
    "SetsInside", "TakenHook", "TorchDispatchMode", "accumulate_after_backward", "after_accumulation", "after_backward",
    "before_accumulation", "begin_root", "checkpoint_wrapper", "compile_forward", "compile_records", "count_operators", "default_store",
    "dtensor_rules", "exporting_fake_mode", "extend_dtensor_operators", "fake_tensor_mode", "fake_tensor_type", "flatten_mesh",
    "found_inf_tensors", "functional_all_gather", "functional_maximum", "functional_reduce_scatter", "gpu_described",
    "graph_breaks", "group_named", "group_timeout", "has_gradient_hooks", "has_matrix_tiles", "has_step_hooks",
    "has_user_hooks", "hook_tables", "in_backward", "inner_hooks", "is_stand_in", "is_strided_shard", "is_transformed",
    "is_view", "join_fake_group", "laid_out", "leave_uncompiled", "local_box", "local_grad_scaler",
    "micro_pipelined", "note_inner_hooks", "num_compile_failures", "num_graphs", "observe_gathering", "onednn_block",
    "onednn_computes_in", "outside_fake_mode", "persistent_buffers", "pipeline_orders", "pipeline_unit", "plain_name",
    "process_groups", "quiet_fake_kernels", "reduce_after_backward", "reduced_parameters", "refusing_autograd_functions",
    "registered_children", "replicate", "sample_size", "send_parts", "share_memory_along", "show_gathered", "show_shards",
    "step_hooks", "stood_for", "take_hooks", "tensor_without_storage", "traced_modules", "unreached_parameters", "unwrap_checkpoint",
    "visit_first", "without_transforms", "zero_redundancy_of_parts",
]  # fmt: skip
