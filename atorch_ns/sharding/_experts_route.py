"""The way of tokens to the ranks that hold their experts, and of the results back.

A token goes once to each rank that holds one of its experts, whatever number of them that rank holds. No token is
dropped, so the numbers of rows that ranks exchange differ from step to step: they are exchanged first.

Legend: N tokens of this rank, D model, K choices a token, E experts, S ranks, R rows (a token for one rank),
P pairs (a token and one expert).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from atorch_ns.sharding._collectives import exchange

__all__ = ["Arrived", "Route"]


@dataclass(frozen=True)
class Arrived:
    """What the experts of this rank shall compute: P pairs.

    Attributes:
        tokens: ``[P, D]``.
        index: ``[P, 1]``, counted from this rank's first expert.
        weights: ``[P, 1]``.
    """

    tokens: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Route:
    """Which rows go where in one forward pass.

    Attributes:
        group: the ranks that divide the experts.
        num_tokens: N.
        row_tokens: ``[R]``, the token of each row that leaves, sorted by the rank it goes to.
        choices: ``[P]``, the places among the ``N * K`` choices whose weights leave, sorted likewise.
        sent_rows: rows to each rank.
        received_rows: rows from each rank.
        sent_pairs: pairs to each rank.
        received_pairs: pairs from each rank.
        pair_rows: ``[P']``, for each pair that arrives the row that is its token.
        pair_experts: ``[P']``, for each pair that arrives this rank's expert.
    """

    group: dist.ProcessGroup
    num_tokens: int
    row_tokens: torch.Tensor
    choices: torch.Tensor
    sent_rows: list[int]
    received_rows: list[int]
    sent_pairs: list[int]
    received_pairs: list[int]
    pair_rows: torch.Tensor
    pair_experts: torch.Tensor

    @classmethod
    @torch.no_grad()
    def find(cls, index: torch.Tensor, num_experts: int, group: dist.ProcessGroup) -> Route:
        """The route of tokens to the experts chosen for them; collective.

        Args:
            index: ``[N, K]``, the choices; ``num_experts`` stands for none.
            num_experts: E; rank ``r`` of the group holds those from ``r * E / S`` on.
            group: the ranks.
        """
        ranks, per_rank = group.size(), num_experts // group.size()
        num_tokens, num_choices = index.shape
        chosen = index.reshape(-1).long()
        target = torch.div(chosen, per_rank, rounding_mode="floor").clamp(max=ranks)
        order = torch.argsort(target, stable=True)
        target = target[order]
        tokens = torch.div(order, num_choices, rounding_mode="floor")
        goes = torch.zeros(ranks + 1, num_tokens, dtype=torch.bool, device=index.device)
        goes[target, tokens] = True
        place = goes.long().cumsum(1) - 1  # of a token among those that go to one rank
        pairs_to = target.new_zeros(ranks + 1).scatter_add(0, target, torch.ones_like(target))
        counts = torch.stack([goes[:ranks].sum(1), pairs_to[:ranks]], dim=1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        (sent_rows, sent_pairs), (received_rows, received_pairs) = torch.stack([counts, arriving]).mT.tolist()
        kept = slice(0, sum(sent_pairs))
        pairs = torch.stack([place[target, tokens], chosen[order] - target * per_rank], dim=1)[kept]
        pairs = exchange(pairs, sent_pairs, received_pairs, group)
        arrived = torch.tensor(received_rows, device=index.device)
        first_rows = (arrived.cumsum(0) - arrived).repeat_interleave(
            torch.tensor(received_pairs, device=index.device), output_size=sum(received_pairs)
        )
        return cls(
            group=group,
            num_tokens=num_tokens,
            row_tokens=goes[:ranks].nonzero()[:, 1],
            choices=order[kept],
            sent_rows=sent_rows,
            received_rows=received_rows,
            sent_pairs=sent_pairs,
            received_pairs=received_pairs,
            pair_rows=first_rows + pairs[:, 0],
            pair_experts=pairs[:, 1],
        )

    def send(self, hidden: torch.Tensor, weights: torch.Tensor) -> Arrived:
        """Sends tokens ``[N, D]`` and weights ``[N, K]`` to the experts; collective.

        On a rank to which nothing comes there is one pair of zeros, so that its experts get gradients (zeros) and
        its part of the backward pass exists.
        """
        rows = exchange(hidden[self.row_tokens], self.sent_rows, self.received_rows, self.group)
        given = weights.reshape(-1, 1)[self.choices]
        given = exchange(given, self.sent_pairs, self.received_pairs, self.group)
        tokens, index = rows[self.pair_rows], self.pair_experts[:, None]
        if len(index) == 0:
            tokens = torch.cat([tokens, tokens.new_zeros(1, hidden.size(1))])
            given = torch.cat([given, given.new_zeros(1, 1)])
            index = index.new_zeros(1, 1)
        return Arrived(tokens, index, given)

    def bring_back(self, results: torch.Tensor) -> torch.Tensor:
        """Sends the experts' results ``[P, D]`` back and adds up those of each token; collective.

        Returns:
            ``[N, D]``.
        """
        mine = results[: len(self.pair_rows)]
        rows = mine.new_zeros(sum(self.received_rows), mine.size(1)).index_add(0, self.pair_rows, mine)
        rows = exchange(rows, self.received_rows, self.sent_rows, self.group)
        # The addition saves its indices for the backward pass. As the last operator that saves anything, it makes
        # a recomputation, which stops there, communicate on every rank as often as the forward pass did.
        return rows.new_zeros(self.num_tokens, rows.size(1)).index_add(0, self.row_tokens, rows)
