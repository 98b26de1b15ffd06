"""The planted faults: each a change of one line, and the tests of which at least one must fail with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Fault:
    """A small change of a file that tests must find.

    Attributes:
        name: what goes wrong, in plain words.
        file: the file, relative to the root.
        before: text that occurs once in the file.
        after: what stands there instead.
        tests: pytest's node ids or files, of which at least one fails with the change; none is slow.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def planted_in(self, text: str) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: if what is to be changed does not occur once.
        """
        if (times := text.count(self.before)) != 1:
            raise ValueError(
                f"{self.file} has {times} times what the fault {self.name!r} changes: {self.before!r}"
            )
        return text.replace(self.before, self.after)


FAULTS: Final[tuple[Fault, ...]] = (
    Fault(
        "the dry run is left out where it is asked for",
        "atorch_ns/api.py",
        "if not ignore_dryrun_on_load_strategy:",
        "if ignore_dryrun_on_load_strategy:",
        ("tests/test_api.py::test_dry_run_refuses_a_loss_that_is_not_finite",),
    ),
    Fault(
        "a dry run changes the buffers of the model",
        "atorch_ns/apply/apply.py",
        "buffer.copy_(buffers[name])",
        "buffer.copy_(buffer)",
        ("tests/apply/test_apply.py::test_a_dry_run_leaves_no_trace",),
    ),
    Fault(
        "the random state of numpy is not restored",
        "atorch_ns/capture/random_states.py",
        "np.random.set_state(numpy_state)",
        "np.random.set_state(np.random.get_state())",
        ("tests/capture/test_random_states.py::test_a_block_that_draws_and_raises_changes_no_stream",),
    ),
    Fault(
        "the digest of a file is that of its last piece",
        "atorch_ns/checkpoint/files.py",
        "digest = zlib.crc32(chunk[:count], digest)",
        "digest = zlib.crc32(chunk[:count])",
        ("tests/checkpoint/test_files.py::test_a_file_that_is_read_piece_by_piece_has_one_digest",),
    ),
    Fault(
        "a run resumes from its oldest checkpoint",
        "atorch_ns/checkpoint/folder.py",
        "sorted(numbered, reverse=True)",
        "sorted(numbered)",
        ("tests/checkpoint/test_folder.py::test_a_lost_pointer_means_the_highest_step",),
    ),
    Fault(
        "states of the optimizer go to other parameters in a checkpoint of one file",
        "atorch_ns/checkpoint/one_file.py",
        "names = sorted(group.params, key=order.__getitem__)",
        "names = sorted(group.params, key=order.__getitem__, reverse=True)",
        (
            "tests/trainer/test_checkpoints.py::"
            "test_merged_files_have_all_names_of_tied_weights_and_the_models_order",
        ),
    ),
    Fault(
        "strategies that are alike give the exit code of a difference",
        "atorch_ns/cli/strategy.py",
        "if not result.same:",
        "if result.same:",
        ("tests/cli/test_cli.py::test_strategy_verbs",),
    ),
    Fault(
        "an efficiency of one's own is that of no dtype",
        "atorch_ns/cluster/hardware.py",
        "return self.flops_of(dtype) * self.efficiencies.get(dtype, self.efficiency)",
        "return self.flops_of(dtype) * self.efficiencies.get(dtype, 1.0)",
        ("tests/cluster/test_spec.py::test_an_efficiency_of_one_s_own_holds_for_all_dtypes",),
    ),
    Fault(
        "a ring of ranks sends one message too many",
        "atorch_ns/costs/collectives.py",
        "RING_STEPS[kind] * (ranks - 1) * count",
        "RING_STEPS[kind] * ranks * count",
        ("tests/estimate/time/test_step.py::test_a_cpu_hides_nothing_behind_computation_and_a_gpu_does",),
    ),
    Fault(
        "an epoch that is resumed leaves out a step",
        "atorch_ns/data/samplers.py",
        "return islice(iter(self.steps), self.skip, None)",
        "return islice(iter(self.steps), self.skip + bool(self.skip), None)",
        ("tests/data/test_loader.py::TestPosition",),
    ),
    Fault(
        "every micro-batch is the first one",
        "atorch_ns/data/batch.py",
        "return leaf[begin : begin + step] if leaf.dim() else leaf",
        "return leaf[:step] if leaf.dim() else leaf",
        ("tests/data/test_batch.py::TestSplitBatch",),
    ),
    Fault(
        "gradients of weighed micro-batches are too small by the number of data ranks",
        "atorch_ns/data/step_work.py",
        '"shares": [n * count for count in counts],',
        '"shares": [1 * count for count in counts],',
        ("tests/job/test_micro_steps.py::test_gradients_are_those_of_one_process_on_all_samples[names0]",),
    ),
    Fault(
        "a clock that is slow is not named",
        "atorch_ns/doctor/node_findings.py",
        "if abs(ahead[node] - middle) > _SKEW_S + doubt]",
        "if ahead[node] - middle > _SKEW_S + doubt]",
        ("tests/doctor/test_node_findings.py",),
    ),
    Fault(
        "a rank that hangs in a trial is waited for twice as long as allowed",
        "atorch_ns/engine/coordinator/trial.py",
        "overrun > self.task.deadline_s + self.grace_s:",
        "overrun > 2 * self.task.deadline_s + self.grace_s:",
        ("tests/engine/coordinator/test_coordinator.py::test_a_rank_that_overruns_its_deadline_hangs",),
    ),
    Fault(
        "a file with a token that others can read brings no warning",
        "atorch_ns/engine/rpc/auth.py",
        "if path.stat().st_mode & 0o077:",
        "if path.stat().st_mode & 0o007:",
        ("tests/engine/rpc/test_auth.py",),
    ),
    Fault(
        "only the first problem of a strategy is told",
        "atorch_ns/errors.py",
        "for number, problem in enumerate(self.problems, 1)]",
        "for number, problem in enumerate(self.problems[:1], 1)]",
        ("tests/test_errors.py",),
    ),
    Fault(
        "the peak of memory is that of the moment that needs least",
        "atorch_ns/estimate/memory/peak.py",
        "usage.sum(axis=1)).argmax(axis=0)",
        "usage.sum(axis=1)).argmin(axis=0)",
        ("tests/estimate/memory/test_peak.py::test_predicted_is_measured[mlp, small]",),
    ),
    Fault(
        "a rank skips no step whose gradients overflow on another",
        "atorch_ns/job/loss.py",
        "dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self._group)",
        "dist.all_reduce(overflow, op=dist.ReduceOp.MIN, group=self._group)",
        ("tests/opt_lib/test_loss_scaling.py::test_a_rank_without_gradients_scales_alike",),
    ),
    Fault(
        "the exit code does not say which signal ended the ranks",
        "atorch_ns/processes/ranks.py",
        "raise SystemExit(128 + received[-1])",
        "raise SystemExit(1)",
        ("tests/processes/test_ranks.py::test_ctrl_c_goes_to_rank_0",),
    ),
    Fault(
        "a rank is taken for one of another stage",
        "atorch_ns/merak/mpu.py",
        "for axis, size in reversed(tuple(zip(AXES, self.sizes, strict=True))):",
        "for axis, size in tuple(zip(AXES, self.sizes, strict=True)):",
        ("tests/merak/test_mpu.py::test_a_place_gives_back_its_rank",),
    ),
    Fault(
        "methods that cannot be used together are not refused",
        "atorch_ns/method/resolve.py",
        "problems += unfilled + _find_clashes([*chosen, *left_out])",
        "problems += unfilled",
        ("tests/method/test_resolve.py::test_one_process_finds_the_mistakes_that_more_would",),
    ),
    Fault(
        "a parameter with a wrong gradient passes verification",
        "atorch_ns/numerics/verdict.py",
        "over = gradient > allowed[0] or error > allowed[1]",
        "over = gradient > allowed[0] and error > allowed[1]",
        ("tests/numerics/test_verdict.py",),
    ),
    Fault(
        "rows of causal attention are divided as if they saw no others",
        "atorch_ns/operators/rules/products.py",
        'rows = None if call.argument("is_causal") else "T"',
        'rows = "T"',
        ("tests/operators/rules/test_products.py::test_a_call_has_all_its_rules_and_no_wrong_one",),
    ),
    Fault(
        "gradients of modules made parallel stay means",
        "atorch_ns/parallel/optimizer.py",
        "self._multiply_means(self._config.num_units)",
        "self._multiply_means(1)",
        ("tests/parallel/test_forms.py::test_a_class_in_a_loop_of_ones_own",),
    ),
    Fault(
        "only the last micro-batch gives the weights of a stage their gradient",
        "atorch_ns/pipeline/run/weight_gradients.py",
        "grad.addmm_(left, right)",
        "grad.copy_(left @ right)",
        ("tests/pipeline/run/test_weight_gradients.py::test_both_parts_give_the_gradients_of_the_whole",),
    ),
    Fault(
        "an estimate does not say what was left out of the strategy",
        "atorch_ns/planning/in_code.py",
        "return replace(priced.estimate, notes=priced.notes)",
        "return replace(priced.estimate, notes=())",
        ("tests/planning/test_in_code.py::test_what_is_left_out_or_changed_is_noted",),
    ),
    Fault(
        "times that other processes have measured are thrown away",
        "atorch_ns/profile/timing.py",
        "entries = self._read_entries()",
        "entries = {}",
        ("tests/profile/test_database.py::test_concurrent_writers_lose_nothing",),
    ),
    Fault(
        "a report shows predictions as measured",
        "atorch_ns/report/info/breakdown.py",
        'measured=best_known if best_known.source == "measured" else None,',
        "measured=best_known,",
        ("tests/report/test_info.py::test_memory_and_time_in_parts",),
    ),
    Fault(
        "a search for the largest batch prefers the smallest",
        "atorch_ns/search/objective.py",
        "return 1 / batch if batch else math.inf",
        "return batch if batch else math.inf",
        ("tests/search/test_objective.py",),
    ),
    Fault(
        "gradients of divided layers are not summed over the ranks",
        "atorch_ns/sharding/collectives.py",
        "return _apply_with_gradient(x, group, _identity_view, total)",
        "return _apply_with_gradient(x, group, _identity_view, _identity_view)",
        ("tests/sharding/test_collectives.py::test_each_collective_has_the_gradient_that_belongs_to_it",),
    ),
    Fault(
        "attention over a ring of ranks counts what was merged before too high",
        "atorch_ns/sharding/sequence/ring.py",
        "out = out * torch.exp(lse - safe)[..., None]",
        "out = out",
        ("tests/sharding/sequence/test_ring.py::test_equals_one_process",),
    ),
    Fault(
        "a comparison of strategies leaves out options that are new",
        "atorch_ns/strategy/diff.py",
        "keys = [*left, *(key for key in right if key not in left)]",
        "keys = [*left]",
        ("tests/strategy/test_diff.py",),
    ),
    Fault(
        "a run whose loss is off has parity",
        "atorch_ns/testing/parity.py",
        "report.max_param_error <= param_tol and report.max_loss_error <= loss_tol:",
        "report.max_param_error <= param_tol:",
        ("tests/testing/test_parity.py::test_a_loss_that_is_not_a_number_fails",),
    ),
    Fault(
        "tensors are divided that have no equal parts",
        "atorch_ns/torch_compat/dtensor_rules.py",
        "and spec.shape[placement.dim] % degree == 0 < spec.shape[placement.dim]",
        "and 0 < spec.shape[placement.dim]",
        ("tests/torch_compat/test_dtensor_rules.py::test_both_kinds_of_strategies_are_read",),
    ),
    Fault(
        "the time of several steps is logged as that of one",
        "atorch_ns/tracking/tracking.py",
        "seconds = (now - begun) / count",
        "seconds = now - begun",
        ("tests/tracking/test_tracking.py::test_the_time_of_a_step_is_that_between_logged_steps",),
    ),
    Fault(
        "micro-batches that fill up the last step count twice",
        "atorch_ns/trainer/batches.py",
        "flags = [False] * len(taken) + [True] * missing",
        "flags = [False] * len(taken) + [False] * missing",
        ("tests/trainer/test_runs.py::test_losses_and_weights_are_those_of_a_plain_loop[one process]",),
    ),
    Fault(
        "gradient_accumulation ignores its number of micro-batches",
        "opt_lib/gradient_accumulation.py",
        "job.step.num_micro_batches = config.num_micro_batches",
        "job.step.num_micro_batches = 1",
        ("tests/opt_lib/test_gradient_accumulation.py",),
    ),
    Fault(
        "half rounds rotary frequencies",
        "opt_lib/half.py",
        "module._buffers[name] = buffer",
        "module._buffers[name] = buffer.to(dtype)",
        ("tests/opt_lib/test_half.py",),
    ),
    Fault(
        "tokens that do not count lower the mean of a loss in chunks",
        "opt_lib/_replacements/cross_entropy.py",
        'return total / (target != ignore_index).sum() if reduction == "mean" else total',
        'return total / target.numel() if reduction == "mean" else total',
        ("tests/opt_lib/replacements/test_cross_entropy.py::test_the_function_is_exact",),
    ),
    Fault(
        "each rank clips its part of the gradients by itself",
        "opt_lib/_optimizer_parts.py",
        "return norm_over(local, norm_type, group)",
        "return local",
        ("tests/opt_lib/test_fairscale.py::test_the_norm_is_that_of_one_process_and_clipping_takes_effect",),
    ),
    Fault(
        "a recomputation begins from the statistics that the forward pass has left",
        "opt_lib/_recompute.py",
        "for slot, value in before.items():",
        "for slot, value in ():",
        ("tests/opt_lib/test_recompute.py::test_parameters_and_buffers_are_those_without_recomputation",),
    ),
)
"""Forty, over all rooms of the packages."""
