"""PolicyGraph: the operators of a module for a user's policy, whose nnScaler verbs write an operator plan."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Shard

from atorch_ns.capture.graph.operator_graph import Operator
from atorch_ns.errors import InputError
from atorch_ns.operators import OperatorGraph, OperatorPlan, legal_rules
from atorch_ns.operators.choose import parameter_placements
from atorch_ns.operators.rules.rule import Rule, whole_rule
from atorch_ns.parallel.config import ComputeConfig
from atorch_ns.parallel.policies import Division
from atorch_ns.text import first_few, with_article


class PolicyNode:
    """One operator.

    Attributes:
        name, signature: its short name (``linear``), and its full name (``aten.linear.default``).
        fqn: the path of the module that calls it.
        classes: the classes of the modules that hold the call, joined by dots.
        source: file, line and text of the code that calls it.
    """

    def __init__(self, graph: PolicyGraph, operator: Operator) -> None:
        self._graph, self.operator = graph, operator
        self.name, self.signature = operator.name, operator.call.name
        self.fqn, self.classes, self.source = operator.path, operator.classes, operator.source

    def inputs(self) -> list[tuple[int, ...]]:
        """The shapes of its input tensors, indexed by ``idx`` of :meth:`PolicyGraph.partition`."""
        return [spec.shape for spec in self.operator.call.tensors]

    def outputs(self) -> list[tuple[int, ...]]:
        """The shapes of its results."""
        return [spec.shape for spec in self.operator.call.outputs]

    def algorithm(self, name: str = "dim") -> Algorithm:
        """The ways to divide it. There is one kind, along dimensions.

        Raises:
            InputError: for another name.
        """
        if name != "dim":
            raise InputError(f"operators can only be divided by the algorithm 'dim'; got {name!r}.")
        return Algorithm(self)

    def __repr__(self) -> str:
        return str(self.operator)


@dataclass(frozen=True)
class Algorithm:
    """The rules by which a node may be divided."""

    node: PolicyNode

    def satisfy(self, *, idx: int, dim: int, num: int) -> bool:
        """Returns whether dimension ``dim`` of the node's input ``idx`` may be divided over ``num`` ranks."""
        return bool(self.node._graph.rules_for(self.node, idx, dim, num))


@dataclass(frozen=True)
class SubNode:
    """The part of a node that one rank runs, with its index."""

    node: PolicyNode
    number: int
    of: int


class PolicyGraph:
    """The operators of a module, in the order of their calls.

    Operators without a verb are whole on all ranks. Layers of one kind are divided alike.
    """

    def __init__(self, graph: OperatorGraph, config: ComputeConfig) -> None:
        self._graph, self._config = graph, config
        self._nodes = [PolicyNode(self, operator) for operator in graph.operators]
        self._degrees: set[int] = set()  # numbers of parts that partition was given
        self._choices: dict[str, tuple[Rule, PolicyNode]] = {}  # by operator key: layers of one kind share it
        self._starts: list[PolicyNode] = []  # first operators of all stages but the first
        self._recompute_paths: list[str] = []  # paths of blocks
        self._devices: dict[tuple[int, int], int] = {}  # (node, part) to a rank of the unit
        self._legal_rules = functools.cache(functools.partial(legal_rules, graph))  # by number of parts

    def nodes(self, flatten: bool = True) -> list[PolicyNode]:
        """All operators. They are never nested."""
        return list(self._nodes)

    def select(
        self, name: str | None = None, ntype: type | None = None, flatten: bool = True
    ) -> list[PolicyNode]:
        """The operators with a short or full name, or all without one.

        Raises:
            InputError: for a node type, since there is only one.
        """
        if ntype is not None and not issubclass(PolicyNode, ntype):
            raise InputError(
                f"all nodes are PolicyNodes, so none is of type {ntype.__name__}: select by name."
            )
        return [node for node in self._nodes if name is None or name in (node.name, node.signature)]

    def replicate(self, node: PolicyNode, times: int) -> list[SubNode]:
        """Leaves an operator whole on every rank."""
        self._choose_rule(node, whole_rule(node.operator.call))
        return [SubNode(node, number, times) for number in range(times)]

    def partition(
        self, node: PolicyNode, algorithm: Algorithm, *, idx: int, dim: int, num: int
    ) -> list[SubNode]:
        """Divides an operator along dimension ``dim`` of its input ``idx`` over ``num`` ranks.

        Raises:
            InputError: if this division is not allowed. The message names the allowed ones.
        """
        matches = self.rules_for(node, idx, dim, num)
        if not matches:
            legal = [str(rule) for rule in self._legal_rules(num)[node.operator.key] if rule.divides]
            raise InputError(
                f"{node} cannot be divided along dimension {dim} of its input {idx} by {num}. "
                f"{'Its rules are ' + '; '.join(legal) if legal else 'It stays whole'}."
            )
        self._degrees.add(num)
        self._choose_rule(node, matches[0])
        return [SubNode(node, number, num) for number in range(num)]

    def rules_for(self, node: PolicyNode, idx: int, dim: int, num: int) -> list[Rule]:
        """The rules that divide an input along a dimension."""
        if not isinstance(node, PolicyNode):
            raise InputError(f"expected a node of graph.nodes(), got {with_article(node)}.")
        rank = len(node.operator.call.tensors)
        if not 0 <= idx < rank:
            raise InputError(f"{node} has {rank} tensor inputs, so there is no input {idx}.")
        size = len(node.operator.call.tensors[idx].shape)
        if not -size <= dim < size:
            raise InputError(f"input {idx} of {node} has {size} dimensions, so there is no dimension {dim}.")
        sharding = Shard(dim % size)  # negative dimensions count from the end
        return [rule for rule in self._legal_rules(num)[node.operator.key] if rule.inputs[idx] == sharding]

    def assign(self, node: SubNode | PolicyNode, device: int) -> None:
        """Places a part of an operator on a rank of the unit: part ``i`` on rank ``i`` of its stage."""
        part = node if isinstance(node, SubNode) else SubNode(node, 0, 1)
        if part.of == 1 and self._config.plan_ngpus > 1 and not self._starts:
            raise InputError(
                f"{part.node} is on only one device: without stages every rank of a unit runs every operator. Replicate or "
                "partition it, or cut the graph by staging."
            )
        self._devices[self._nodes.index(part.node), part.number] = device

    def staging(self, nodes: Sequence[PolicyNode]) -> None:
        """Cuts the graph between blocks. Stages begin with the first block and the blocks of ``nodes``."""
        first, *others = sorted(nodes, key=self._nodes.index)  # the first operator begins a stage anyway
        self._starts = list(others) if self._nodes.index(first) == 0 else [first, *others]

    def recompute(self, nodes: Iterable[PolicyNode]) -> bool:
        """Recomputes the blocks that hold the operators in the backward pass."""
        paths = {self._graph.segments[node.operator.segment].path for node in nodes}
        if "" in paths:
            raise InputError("recompute supports only operators inside blocks; some of these are outside.")
        self._recompute_paths += sorted(paths - set(self._recompute_paths))
        return True

    def multiref(self, *_: Any, **__: Any) -> None:
        """Does nothing, since autograd adds the gradients of a tensor with several readers."""

    def fuse(self, nodes: Sequence[PolicyNode]) -> Sequence[PolicyNode]:
        """Does nothing, since operators stay separate."""
        return nodes

    def group(self, nodes: Sequence[PolicyNode]) -> Sequence[PolicyNode]:
        """Does nothing, since blocks are the groups."""
        return nodes

    def division(self) -> Division:
        """The division requested by the verbs.

        Raises:
            InputError: if parts are assigned to other ranks than those of their stage.
        """
        num_stages = len(self._starts) + 1
        if num_stages > 1 and not self._config.use_end2end:
            raise InputError("staging makes a pipeline, which needs use_end2end=True.")
        degree = self._config.plan_ngpus // num_stages
        if degree * num_stages != self._config.plan_ngpus or self._degrees - {degree}:
            parts = " and ".join(map(str, sorted(self._degrees)))
            raise InputError(
                f"{num_stages} stages with operators in {parts or 'no'} parts do not make a scale unit of "
                f"{self._config.plan_ngpus} ranks: every operator is divided over all ranks of its stage."
            )
        self._check_devices(degree)
        rules = {key: rule for key, (rule, _) in self._choices.items()}
        plan = OperatorPlan(
            operators={key: rule for key, rule in rules.items() if rule.divides},
            parameters=parameter_placements(self._graph, rules, degree) if degree > 1 else {},
            degree=degree,
            note="by a policy function",
        )
        pipeline: dict[str, Any] = {}
        if num_stages > 1:
            micros = self._config.pas_config.get("pipeline_nmicros")
            if not isinstance(micros, int):
                raise InputError("a policy with staging needs pipeline_nmicros in pas_config.")
            pipeline = {
                "schedule": self._config.pas_config.get("pipeline_scheduler", "1f1b"),
                "num_micro_batches": micros,
                "split_points": [self._split_point(node) for node in self._starts],
            }
        return Division(
            num_stages=num_stages,
            operators={"plan": plan.as_json()} if degree > 1 else None,
            pipeline=pipeline,
            recompute={"wrap_class": self._recompute_paths} if self._recompute_paths else None,
        )

    def _split_point(self, node: PolicyNode) -> str:
        path = self._graph.segments[node.operator.segment].path or node.fqn
        if not path:
            raise InputError(
                f"the module itself calls {node}, so no stage can begin there; name a node of a submodule."
            )
        return path

    def _check_devices(self, degree: int) -> None:
        starts = [self._nodes.index(node) for node in self._starts]
        for (index, number), device in self._devices.items():
            stage = sum(index >= start for start in starts)  # starts at or before the node
            rank = stage * degree + number
            if device != rank:
                raise InputError(
                    f"part {number} of {self._nodes[index]} is assigned to rank {device}; the parts of stage {stage} must be on "
                    f"ranks {stage * degree} to {(stage + 1) * degree - 1}, in order."
                )

    def _choose_rule(self, node: PolicyNode, rule: Rule) -> None:
        key = node.operator.key
        previous = self._choices.get(key)
        if previous is not None and previous[0] != rule:
            raise InputError(
                f"{node} is divided by {rule}, but {previous[1]}, in a layer of the same kind, by {previous[0]}: layers of one kind "
                "must be divided alike."
            )
        self._choices[key] = (rule, node)

    def __iter__(self) -> Iterator[PolicyNode]:
        return iter(self._nodes)

    def __repr__(self) -> str:
        return f"PolicyGraph of {len(self._nodes)} operators: {first_few([node.name for node in self._nodes], 8)}"
