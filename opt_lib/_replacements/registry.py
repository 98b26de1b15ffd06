"""The replacements that are known: those of users and the built-in ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar, overload

import torch
from torch import nn

from atorch_ns.errors import RegistrationError
from atorch_ns.method import dtype_name
from opt_lib._replacements.attention import AttentionSwitch
from opt_lib._replacements.base import ClassPair, Replacement, Requirements
from opt_lib._replacements.cross_entropy import NOT_OVER, LinearCrossEntropy
from opt_lib._replacements.kernels import APEX, LIGER
from opt_lib._replacements.liger import LigerRope, LigerSwiglu
from opt_lib._replacements.making import Convert, converter
from opt_lib._replacements.norms import FusedLayerNorm, FusedRmsNorm

_HALF: Final = frozenset({"float16", "bfloat16"})
_CUDA: Final = frozenset({"cuda"})


def _flash_requirements(package: str, capability: tuple[int, int], install: str) -> Requirements:
    return Requirements(
        package=package,
        install=install,
        imports=(package,),
        device_types=_CUDA,
        capability=capability,
        dtypes=_HALF,
        not_over=NOT_OVER,  # divisions are tested on small CPU tensors, for which flash-attn has no kernel
    )


BUILT_IN: Final[tuple[Replacement, ...]] = (
    # Where several want the same modules, the preferred one stands first: each works on what is left to it.
    # FlashAttention 3 is for Hopper (9.0), FlashAttention 2 from Ampere (8.0) on.
    AttentionSwitch(
        name="flash_attention_3",
        implementation="flash_attention_3",
        requirements=_flash_requirements(
            "flash_attn_interface", (9, 0), "build it from the folder hopper of flash-attention's sources"
        ),
        switches=("eager", "sdpa"),
    ),
    AttentionSwitch(
        name="flash_attention",
        implementation="flash_attention_2",
        requirements=_flash_requirements(
            "flash_attn", (8, 0), "install it with: pip install --no-build-isolation 'atorch-ns[flash]'"
        ),
        switches=("eager", "sdpa"),
    ),
    AttentionSwitch(name="sdpa_attention", implementation="sdpa"),
    LigerRope(),
    LigerSwiglu(),
    FusedRmsNorm(name="liger_rms_norm", kernel="liger", requirements=LIGER),
    FusedRmsNorm(name="apex_rms_norm", kernel="apex", requirements=APEX),
    FusedRmsNorm(),  # torch's kernel
    FusedLayerNorm(name="apex_layer_norm", kernel="apex", requirements=APEX),
    FusedLayerNorm(),
    LinearCrossEntropy(
        name="liger_fused_linear_cross_entropy",
        kernel="liger",
        requirements=replace(LIGER, not_over=NOT_OVER),
    ),
    LinearCrossEntropy(),
)


ClassPairTuple = tuple[type[nn.Module], type[nn.Module]]
Target = TypeVar("Target", bound="type[nn.Module] | Convert")

# What users register is known to the whole process, as the classes they register are.
_REGISTERED: dict[str, ClassPair] = {}


def known_replacements() -> dict[str, Replacement]:
    """All replacements by name, in the order in which they are tried: users' own first."""
    return {**_REGISTERED, **_built_in()}


@overload
def register_replace_pair(
    name: str,
    supported_dtypes: Iterable[torch.dtype | str] | None = None,
    pair_cls: ClassPairTuple = ...,
    *,
    convert: Convert | None = None,
    include_subclasses: bool = False,
    config: Mapping[str, Any] | None = None,
) -> None: ...


@overload
def register_replace_pair(
    name: str,
    supported_dtypes: Iterable[torch.dtype | str] | None = None,
    *,
    replaces: type[nn.Module],
    convert: Convert | None = None,
    include_subclasses: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Callable[[Target], Target]: ...


def register_replace_pair(
    name: str,
    supported_dtypes: Iterable[torch.dtype | str] | None = None,
    pair_cls: ClassPairTuple | None = None,
    *,
    replaces: type[nn.Module] | None = None,
    convert: Convert | None = None,
    include_subclasses: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Callable[[Any], Any] | None:
    """Registers a replacement of your own; ``module_replace`` uses it from then on, before the built-in ones.

    ::

        register_replace_pair("fast_norm", supported_dtypes={torch.bfloat16}, pair_cls=(Norm, FastNorm))

        @register_replace_pair("fast_mlp", replaces=Mlp)
        class FastMlp(nn.Module): ...

        @register_replace_pair("fast_attention", replaces=Attention)
        def fast_attention(attention: nn.Module) -> nn.Module: ...

    The first of these that applies makes the new module: ``convert``; ``Target.from_module(module)``, a class
    method; taking over the attributes, without ``__init__``, where the target is a subclass of the source;
    the target's constructor, its parameters read off the attributes of the same name. Then it is given the
    old one's parameters and buffers, the same objects, by name: it must have exactly these.

    Settings are those of ``config``, overridden by those under the pair's name in ``configs`` of
    ``module_replace``: keyword arguments of the function or the constructor, or attributes of the target.

    Args:
        name: the name in ``include`` and ``exclude``.
        supported_dtypes: the dtypes that the new module computes in; in jobs that compute in another one the
            pair is left out, and the report says so. ``None`` for any.
        pair_cls: the class to be replaced and the class to replace it.
        replaces: instead of ``pair_cls``, the class to be replaced; then this is a decorator of the class
            that replaces it, or of a function that makes the new module from the old one.
        convert: makes the new module from the old one.
        include_subclasses: also replace modules whose class derives from the one to be replaced.
        config: settings of the new modules, by name.

    Raises:
        RegistrationError: if the name is taken, or an argument is not what it should be.
    """
    source, target = _validate_classes(name, pair_cls, replaces)
    if convert is not None and not callable(convert):
        raise RegistrationError(
            f"{name!r}: convert={convert!r} is not a function from the old module to the new."
        )
    requirements = Requirements(dtypes=_dtype_names(name, supported_dtypes))

    def register(made_by: Any) -> Any:
        kind = made_by if _is_module_class(made_by) else None  # else a function that makes the new module
        if kind is None and (convert is not None or not callable(made_by) or isinstance(made_by, type)):
            raise RegistrationError(f"{name!r}: {made_by!r} is not a subclass of torch.nn.Module.")
        _refuse_taken(name)
        _REGISTERED[name] = ClassPair(
            name=name,
            source=source,
            convert=convert or (made_by if kind is None else converter(source, kind)),
            target=kind,
            requirements=requirements,
            include_subclasses=include_subclasses,
            config=dict(config or {}),
        )
        return made_by

    if target is None:
        return register
    register(target)
    return None


def unregister_replace_pair(name: str) -> None:
    """Forgets a replacement that was registered.

    Raises:
        RegistrationError: if none of that name was.
    """
    if name not in _REGISTERED:
        names = ", ".join(sorted(_REGISTERED)) or "none"
        raise RegistrationError(f"no replacement {name!r} is registered; registered: {names}.")
    del _REGISTERED[name]


def registered_pairs() -> dict[str, ClassPair]:
    """The pairs that users registered, by name."""
    return dict(_REGISTERED)


def set_registered_pairs(pairs: Mapping[str, ClassPair]) -> None:
    """Registers ``pairs`` and no others, as in the process that they come from."""
    _REGISTERED.clear()
    _REGISTERED.update(pairs)


def _refuse_taken(name: str) -> None:
    if name in _built_in():
        raise RegistrationError(f"the name {name!r} belongs to a built-in replacement; choose another.")
    if name in _REGISTERED:
        raise RegistrationError(
            f"a replacement {name!r} for {_REGISTERED[name].source.__name__} is already "
            f"registered. Choose another name, or call unregister_replace_pair({name!r}) first."
        )


@functools.cache
def _built_in() -> dict[str, Replacement]:
    return {replacement.name: replacement for replacement in BUILT_IN}


def _validate_classes(
    name: object, pair_cls: object, replaces: object
) -> tuple[type[nn.Module], type[nn.Module] | None]:
    if not isinstance(name, str) or not name:
        raise RegistrationError(f"the name of a replacement must be a string, not {name!r}.")
    if (pair_cls is None) == (replaces is None):
        raise RegistrationError(
            f"{name!r}: give either pair_cls=(the class to replace, the class that replaces it), or "
            "replaces=the class to replace, as a decorator of the class that replaces it."
        )
    if pair_cls is None:
        if not _is_module_class(replaces):
            raise RegistrationError(f"{name!r}: replaces={replaces!r} is not a subclass of torch.nn.Module.")
        return replaces, None  # type: ignore[return-value]  # a module class, as just checked
    pair = tuple(pair_cls) if isinstance(pair_cls, (tuple, list)) else ()
    if len(pair) != 2 or not all(_is_module_class(kind) for kind in pair):
        raise RegistrationError(
            f"{name!r}: pair_cls={pair_cls!r} is not a pair of classes. Accepted: (the class to replace, the "
            "class that replaces it), both subclasses of torch.nn.Module."
        )
    if pair[0] is pair[1]:
        raise RegistrationError(f"{name!r}: pair_cls names {pair[0].__name__} twice.")
    return pair


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _dtype_names(name: str, dtypes: Iterable[torch.dtype | str] | None) -> frozenset[str] | None:
    if dtypes is None:
        return None
    items = [dtypes] if isinstance(dtypes, (str, torch.dtype)) else dtypes
    try:
        names = frozenset(dtype_name(dtype) for dtype in items)
    except (TypeError, ValueError) as error:
        raise RegistrationError(
            f"{name!r}: supported_dtypes={dtypes!r}: {error}. Accepted: a set of torch.float32, "
            "torch.float16 and torch.bfloat16."
        ) from error
    if not names:
        raise RegistrationError(f"{name!r}: supported_dtypes is empty, so the pair could never be used.")
    return names
