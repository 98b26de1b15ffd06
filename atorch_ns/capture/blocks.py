"""The repeated blocks of a model, found by structure."""

from __future__ import annotations

import enum
import fnmatch
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from atorch_ns.torch_compat import is_stand_in, pipeline_unit, plain_name, stood_for, unwrap_checkpoint

K = TypeVar("K")

_STANDS_FOR = "_stands_for_classes"  # the attribute that stand_for sets


def select_modules(
    model: nn.Module, selectors: Iterable[str], *, outermost: bool = False
) -> list[NamedModule]:
    """The modules that match any selector, in the order of ``model.named_modules()``, without the root.

    Args:
        model: the model to search. A wrapped module is matched by its inner module; the wrapper is returned.
        selectors: class names (``"LlamaDecoderLayer"``), qualified class names, or dotted paths, which may
            hold ``*`` (``"layers.*"``). A base class selects its subclasses.
        outermost: whether to leave out modules inside a selected module.
    """
    patterns = tuple(selectors)
    modules: list[NamedModule] = []
    for name, module in model.named_modules():
        if not name or name.endswith("_checkpoint_wrapped_module") or _belongs_to_pipeline(module):
            continue
        if outermost and any(name.startswith(f"{outer.name}.") for outer in modules):
            continue
        if matches(plain_name(name), unwrap_checkpoint(module), patterns):
            modules.append(NamedModule(name, module))
    return modules


def _belongs_to_pipeline(module: nn.Module) -> bool:
    # The inner module of a unit is found too, and a placeholder is another rank's module.
    return pipeline_unit(module)[1] is not module or is_stand_in(module)


def matches(name: str, module: nn.Module, selectors: Iterable[str]) -> bool:
    """Whether one of the selectors matches a module."""
    classes = class_names(module)
    return any(
        selector in classes or (fnmatch.fnmatchcase(name, selector) and not _selects_all(selector))
        for selector in selectors
    )


def class_names(module: nn.Module) -> set[str]:
    """Names of a module's class and its bases below ``nn.Module``: bare, qualified and full.

    The names of a module that it replaces (:func:`stand_for`) are included.
    """
    names: set[str] = set(vars(module).get(_STANDS_FOR, ()))
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        names |= {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}
    return names


def stand_for(new: nn.Module, old: nn.Module) -> None:
    """Makes ``new``, which replaces ``old``, match selectors by the class names of ``old`` too.

    A strategy is written, and checked, against the classes of the user's model; selectors of later methods
    must match after a method has replaced modules.
    """
    vars(new)[_STANDS_FOR] = tuple(sorted(class_names(old)))


def _selects_all(selector: str) -> bool:
    return selector.strip("*") == ""  # a bare * would select every module


_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "nhead")
_KEY_VALUE_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "top_k")
_VOCABULARY = ("vocab_size", "vocabulary_size", "n_vocab")


def num_heads(model: nn.Module) -> int:
    """Attention heads of a layer, from the model's config or its modules' attributes; 0 if unknown."""
    return _first_positive_int(_iter_setting_owners(model), _HEADS)


def num_key_value_heads(model: nn.Module) -> int:
    """Number of key and value heads; the number of query heads if the model has no other."""
    return _first_positive_int(_iter_setting_owners(model), _KEY_VALUE_HEADS) or num_heads(model)


def num_experts(model: nn.Module) -> int:
    """Experts of a layer, from the model's config or its modules' attributes; 0 if unknown."""
    return _first_positive_int(_iter_setting_owners(model), _EXPERTS)


def experts_per_token(model: nn.Module) -> int:
    """Number of experts per token; 1 if the model does not say, 0 without experts."""
    return (_first_positive_int(_iter_setting_owners(model), _PER_TOKEN) or 1) if num_experts(model) else 0


def vocabulary_size(model: nn.Module) -> int:
    """Rows of the token embedding, from the config or the largest ``nn.Embedding``; 0 without one."""
    embeddings = (module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
    return _first_positive_int(_iter_configs(model), _VOCABULARY) or max(embeddings, default=0)


def _iter_configs(model: nn.Module) -> Iterable[Any]:
    config = getattr(model, "config", None)
    if config is not None:
        yield config
        text = getattr(config, "text_config", None)
        if text is not None:
            yield text


def _iter_setting_owners(model: nn.Module) -> Iterable[Any]:
    yield from _iter_configs(model)
    yield from model.modules()


def _first_positive_int(holders: Iterable[Any], names: Iterable[str]) -> int:
    attributes = tuple(names)
    for holder in holders:
        for name in attributes:
            value = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


_POSITION = re.compile(r"(idx|index|id|num|number|no|i|position|depth)$")  # endings of names of positions


def fingerprint(module: nn.Module) -> str:
    """A digest of 16 hexadecimal digits."""
    return _facts_digest(_module_facts(module))


def fingerprints(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """The fingerprint of each block, by path.

    A number that is only the position of a block (``layer_idx``) is left out: it goes up by one from each
    block to the next of its container, and its name is that of a position, or there are at least four blocks.
    """
    digests: dict[str, str] = {}
    for paths in by_container(blocks).values():
        facts = [dict(_module_facts(blocks[path])) for path in paths]
        places = _position_keys(facts)
        for path, entries in zip(paths, facts, strict=True):
            digests[path] = _facts_digest((key, value) for key, value in entries.items() if key not in places)
    return {path: digests[path] for path in blocks}


def counters(modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """Attributes that hold a block's position, as dotted paths, from the blocks of one container in order."""
    places = _position_keys([dict(_module_facts(module)) for module in modules])
    return tuple(sorted(key.removeprefix(".") for key in places))


def by_container(blocks: Iterable[str]) -> dict[str, list[str]]:
    """Paths of blocks by the path of their container."""
    groups: dict[str, list[str]] = {}
    for path in blocks:
        groups.setdefault(path.rpartition(".")[0], []).append(path)
    return groups


def _position_keys(facts: list[dict[str, Any]]) -> set[str]:
    if len(facts) < 2:
        return set()
    places = set()
    for key, first in facts[0].items():
        if isinstance(first, bool) or not isinstance(first, int):  # True is an int
            continue
        counts = all(facts[step].get(key) == first + step for step in range(1, len(facts)))  # +1 per block
        if counts and (len(facts) >= 4 or _POSITION.search(key)):  # fewer may count by chance
            places.add(key)
    return places


def _module_facts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    first_names: dict[int, str] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        yield f"{path}:class", f"{type(child).__module__}.{type(child).__qualname__}"
        attributes = vars(child)
        for kind in ("_parameters", "_buffers"):
            for name, tensor in attributes[kind].items():
                if tensor is not None:
                    first = first_names.setdefault(id(tensor), f"{path}.{name}")  # shows which are tied
                    shape = "x".join(map(str, tensor.shape))
                    yield f"{path}.{name}:tensor", f"{shape} {tensor.dtype} {tensor.requires_grad} {first}"
        for name, value in attributes.items():
            if name[:1] != "_" and (plain := _setting_value(value)) is not None:
                yield f"{path}.{name}", plain


def _setting_value(value: Any) -> Any:
    if value is None:
        return "None"
    if isinstance(value, float):
        return f"float {value != 0}"  # all rates but 0 cost the same
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (torch.dtype, enum.Enum)):
        return str(value)
    if isinstance(value, (tuple, list)) and len(value) <= 16:
        items = [_setting_value(item) for item in value]
        return None if any(item is None for item in items) else str(items)
    if callable(value) and not isinstance(value, nn.Module):
        return getattr(value, "__qualname__", None)
    return None  # not a setting


def _facts_digest(facts: Any) -> str:
    text = "\n".join(f"{key}={value}" for key, value in facts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class NamedModule(NamedTuple):
    """A module and its dotted path from the root."""

    name: str
    module: nn.Module


def repeated_blocks(model: nn.Module) -> list[NamedModule]:
    """The outermost repeated modules of a model in order, such as the layers of a transformer or deep MLP.

    A container (``ModuleList``, ``Sequential``, ``ModuleDict``) repeats a block when at least two of its
    children are of one class, or of classes made from one, have parameters and can be called. All its
    children of such classes are blocks: those of a hybrid model attend and recur in turns. Classes that hold
    modules come before others, and torch's layers (``nn.Linear``) last, however many: the model does not
    repeat the layers around its blocks. Containers inside a block are skipped. Several containers (encoder
    and decoder) each give their blocks, and so do several models in one container. Blocks of a pipeline's
    other ranks count, but are not returned.
    """
    blocks: list[NamedModule] = []
    _collect_blocks(model, "", blocks)
    return blocks


def _collect_blocks(module: nn.Module, prefix: str, blocks: list[NamedModule]) -> None:
    block_classes = _repeated_classes(module)
    for name, child in module.named_children():
        if is_stand_in(child):
            continue
        inner, child = pipeline_unit(child)
        path = f"{prefix}{name}{inner}"
        if type(unwrap_checkpoint(child)) in block_classes:
            blocks.append(NamedModule(path, child))
        else:
            _collect_blocks(child, f"{path}.", blocks)


def _repeated_classes(container: nn.Module) -> set[type[nn.Module]]:
    if not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return set()
    children = [
        unwrap_checkpoint(pipeline_unit(stood_for(child))[1])
        for child in container.children()
        if is_stand_in(child) or any(True for _ in child.parameters())
    ]
    callables = [child for child in children if can_be_called(child)]  # of others the model calls children
    ranks: dict[type[nn.Module], int] = {}
    for child in callables:
        ranks[type(child)] = max(ranks.get(type(child), 0), _block_rank(child))
    counts = Counter(type(child) for child in callables)
    frequent = [kind for kind in counts if counts[kind] >= 2]
    # Classes with a common base count together, as the two kinds of blocks of a hybrid model.
    holding = {kind for kind in counts if ranks[kind] == _HOLDS_MODULES}
    kin = Counter(base for child in callables if type(child) in holding for base in _made_from(type(child)))
    alike = {kind for kind in holding if any(kin[base] >= 2 for base in _made_from(kind))}
    if any(_holds_blocks(child) for child in callables if type(child) in alike.difference(frequent)):
        alike = set()  # models, each with blocks of its own
    blocks = alike | holding.intersection(frequent)
    # Without blocks: the class that ranks highest as a block, then the most frequent one.
    layers = sorted(frequent, key=lambda kind: (ranks[kind], counts[kind]), reverse=True)
    return blocks or set(layers[:1])


def _made_from(kind: type[nn.Module]) -> list[type]:
    return [
        base
        for base in kind.__mro__[1:]
        if issubclass(base, nn.Module) and base.__module__.partition(".")[0] != "torch"
    ]


def _holds_blocks(module: nn.Module) -> bool:
    return any(_repeated_classes(child) for child in module.modules())


def can_be_called(module: nn.Module) -> bool:
    """Whether it has a forward pass, unlike containers such as ``ModuleList`` and ``ParameterDict``."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


_HOLDS_MODULES = 2  # the rank of a module that has modules inside


def _block_rank(block: nn.Module) -> int:
    """Rank of a module as a block: 2 with modules inside, 1 without, 0 for torch's layers."""
    if any(name != "parametrizations" for name, _ in block.named_children()):  # belongs to a weight
        return _HOLDS_MODULES
    return 0 if any(kind.__module__.startswith("torch.nn.modules.") for kind in _module_classes(block)) else 1


def _module_classes(module: nn.Module) -> list[type]:
    return [kind for kind in type(module).__mro__ if kind is not nn.Module]


@contextmanager
def call_hooks(
    modules: Iterable[tuple[K, nn.Module]],
    before: Callable[[K, nn.Module, Any, Any], None],
    after: Callable[[K, nn.Module, Any, Any], None],
    *,
    prepend: bool = False,
    always: bool = False,
) -> Iterator[None]:
    """Calls functions before and after the calls of modules in the ``with`` block.

    Args:
        modules: pairs of a key and a module.
        before: called as ``(key, module, args, kwargs)`` before a module's forward pass.
        after: called as ``(key, module, args, output)`` after it.
        prepend: whether ``before`` runs before other hooks, which may cast inputs.
        always: whether ``after`` also runs after a failed forward pass, with ``None`` as output.
    """
    with ExitStack() as stack:  # handles remove their hooks in the end
        for key, module in modules:
            hook = partial(before, key)
            stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend))
            stack.enter_context(module.register_forward_hook(partial(after, key), always_call=always))
        yield
