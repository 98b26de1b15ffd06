"""What a plan takes by operator: the rows add up to its price."""

from __future__ import annotations

import pytest
import torch

from atorch_ns.cluster import cluster_from_spec
from atorch_ns.operators import (
    OperatorPlan,
    OperatorPrices,
    States,
    assemble,
    batch_plan,
    capture_shallow,
    costs_text,
    legal_rules,
    operator_costs,
    random_plan,
)
from atorch_ns.testing.models import get_case

CPU = torch.device("cpu")


def test_rows_add_up_to_the_price_and_a_named_choice_is_priced_as_the_solver_prices_it() -> None:
    case = get_case("hf_llama")
    batch = case.make_batch(4, seed=0)
    graph = capture_shallow(case.build().train(), (), batch, device=CPU).graph
    prices = OperatorPrices.on(cluster_from_spec("2xcpu"), 2, "float32")
    assembled = assemble(graph, legal_rules(graph, 2), prices, States(), device=CPU)
    whole = assembled.price(OperatorPlan(degree=2))
    assert whole.bytes_moved == 0
    for plan in (batch_plan(graph, 2), random_plan(graph, 2, 1), random_plan(graph, 2, 2)):
        price, rows = assembled.price(plan), operator_costs(assembled, plan)
        assert sum(row.total for row in rows) == pytest.approx(price.seconds)
        assert sum(row.bytes_moved for row in rows) == pytest.approx(price.bytes_moved)
        assert [row.total for row in rows] == sorted((row.total for row in rows), reverse=True)
        text = costs_text(rows, top=3)
        assert len(text.splitlines()) == 5
        assert f"{len(rows) - 3} more" in text
