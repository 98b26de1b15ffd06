"""The part of an Accelerate config that is about FSDP."""

from __future__ import annotations

from typing import Final

from atorch_ns.strategy._conversion import Converter, number, switch

__all__ = ["read_fsdp"]

_SHARDINGS: Final = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
_PREFETCHES: Final = {
    "BACKWARD_PRE": "BACKWARD_PRE",
    "1": "BACKWARD_PRE",
    "BACKWARD_POST": "BACKWARD_POST",
    "2": "BACKWARD_POST",
    "NO_PREFETCH": None,
    "NONE": None,
}
_SWITCHES: Final = {
    "offload_params": "cpu_offload",
    "forward_prefetch": "forward_prefetch",
    "sync_module_states": "sync_module_states",
}
_UNSHARDED: Final = {
    **dict.fromkeys(
        (
            "auto_wrap_policy",
            "transformer_layer_cls_to_wrap",
            "min_num_params",
            "backward_prefetch",
            "forward_prefetch",
        ),
        "nothing is sharded, so nothing is gathered by units",
    ),
    "sync_module_states": "always so: ddp begins with the weights of rank 0",
    "offload_params": "ddp keeps parameters on the device. fsdp with cpu_offload keeps them on the host, sharded; "
    "optimizer_offload beside ddp keeps optimizer states there, in fp32 or bf16",
}
"""With NO_SHARD."""


def read_fsdp(converter: Converter) -> None:
    """Adds ``fsdp``, or ``ddp`` where nothing is sharded."""
    given = converter.take("fsdp_config.fsdp_version")
    version = str(given or 1)
    if given is not None:
        converter.carry("fsdp_config.fsdp_version", f"{given}: see distributed_type")
    if version not in ("1", "2"):
        raise converter.wrong("fsdp_config.fsdp_version", version, "1, 2")
    old = "; FSDP2 trains the same, and {'version': 1} keeps FSDP1" if version == "1" else ""
    if _sharding(converter) == "NO_SHARD":
        converter.use("ddp")
        converter.carry("distributed_type", "FSDP without sharding → ddp")
        _recomputation(converter)
        _unsharded(converter)
        return
    converter.use("fsdp")
    converter.carry("distributed_type", f"FSDP, version {version} → fsdp{old}")
    _wrapping(converter)
    for key, ours in _SWITCHES.items():
        value = converter.take(f"fsdp_config.fsdp_{key}")
        if value is not None:
            converter.use("fsdp", **{ours: switch(converter, f"fsdp_config.fsdp_{key}", value)})
            converter.carry(f"fsdp_config.fsdp_{key}", f"{value} → fsdp.{ours}")
    prefetch = converter.take("fsdp_config.fsdp_backward_prefetch")
    if prefetch is not None:
        if str(prefetch).upper() not in _PREFETCHES:
            raise converter.wrong("fsdp_config.fsdp_backward_prefetch", prefetch, ", ".join(_PREFETCHES))
        converter.use("fsdp", backward_prefetch=_PREFETCHES[str(prefetch).upper()])
        converter.carry("fsdp_config.fsdp_backward_prefetch", f"{prefetch} → fsdp.backward_prefetch")
    _recomputation(converter)


def _unsharded(converter: Converter) -> None:
    """What the settings of sharding are worth where nothing is sharded."""
    for key, reason in _UNSHARDED.items():
        name = f"fsdp_config.fsdp_{key}"
        if converter.take(name) is not None:
            converter.leave(name, reason)


def _recomputation(converter: Converter) -> None:
    key = "fsdp_config.fsdp_activation_checkpointing"
    given = converter.take(key)
    if given is None:
        return
    on = switch(converter, key, given)
    if on:
        converter.use("checkpoint")
    converter.carry(key, "true → checkpoint" if on else "false: nothing is recomputed")


def _sharding(converter: Converter) -> str:
    """The sharding strategy, whichever of its two keys says it."""
    sharding = "FULL_SHARD"
    for key in ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"):
        value = converter.take(key)
        if value is None:
            continue
        text = str(value).upper()
        text = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(text, _SHARDINGS.get(text, text))
        if text == "HYBRID_SHARD_ZERO2":
            converter.leave(key, "HYBRID_SHARD_ZERO2: gathered parameters are freed, as by HYBRID_SHARD")
            text = "HYBRID_SHARD"
        elif text not in _SHARDINGS.values():
            raise converter.wrong(key, value, ", ".join([*_SHARDINGS.values(), "true, false"]))
        else:
            converter.carry(
                key, f"{value}: nothing is sharded" if text == "NO_SHARD" else f"{value} → {text}"
            )
        sharding = text
    if sharding not in ("FULL_SHARD", "NO_SHARD"):
        converter.use("fsdp", sharding_strategy=sharding)
    return sharding


def _wrapping(converter: Converter) -> None:
    policy = str(converter.take("fsdp_config.fsdp_auto_wrap_policy", "")).upper()
    classes = converter.take("fsdp_config.fsdp_transformer_layer_cls_to_wrap")
    least = converter.take("fsdp_config.fsdp_min_num_params")
    if policy:
        converter.carry("fsdp_config.fsdp_auto_wrap_policy", _wrapping_text(policy))
    if policy == "NO_WRAP":
        converter.use("fsdp", atorch_wrap_cls=[])
    if classes is not None:
        names = classes if isinstance(classes, list) else str(classes).split(",")
        converter.use("fsdp", atorch_wrap_cls=[str(each).strip() for each in names])
        converter.carry("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "→ fsdp.atorch_wrap_cls")
    if least is not None:
        if policy == "SIZE_BASED_WRAP":
            least = number(converter, "fsdp_config.fsdp_min_num_params", least)
            converter.use("fsdp", atorch_size_based_min_num_params=least)
            converter.carry("fsdp_config.fsdp_min_num_params", "→ fsdp.atorch_size_based_min_num_params")
        else:
            converter.leave("fsdp_config.fsdp_min_num_params", "read only with SIZE_BASED_WRAP")


def _wrapping_text(policy: str) -> str:
    texts = {
        "TRANSFORMER_BASED_WRAP": "TRANSFORMER_BASED_WRAP: a unit for each of the named classes, or for each repeated block",
        "SIZE_BASED_WRAP": "SIZE_BASED_WRAP: a unit for each module of that many parameters",
        "NO_WRAP": "NO_WRAP: the whole model is one unit",
    }
    return texts.get(policy, policy)
