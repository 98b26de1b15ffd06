"""Text generation by a model that ranks divide: one forward pass of the whole text for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

from atorch_ns.errors import InputError

_TOP_P: Final = 0.9  # Merak's share of probability that tokens are drawn from
_ROUND: Final = 64  # texts are padded to multiples of it: a pipeline is traced again for each length

Forward = Callable[[dict[str, torch.Tensor]], Any]
"""The model's outputs for a batch, on every rank."""


def continued(
    forward: Forward,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    temperature: float,
    ends: frozenset[int],
    device: torch.device,
    agree: Callable[[list[int]], list[int]],
    top_p: float = _TOP_P,
) -> list[list[int]]:
    """The prompts, each continued to ``length`` tokens or to an end token.

    Shorter texts are padded at their ends, which earlier tokens of a causal model do not see.

    Args:
        forward: the model.
        prompts: tokens, at least one for each text.
        length: the longest text, prompt included.
        temperature: divisor of the logits. 0 takes the likeliest token.
        ends: tokens that end a text.
        device: the device of the batches.
        agree: returns the first rank's tokens on all ranks.
        top_p: the share of probability that tokens are drawn from, the likeliest first.
    """
    texts = [list(prompt) for prompt in prompts]
    open_ = {row for row, text in enumerate(texts) if len(text) < length}  # texts that still grow
    # One pass of all texts for each token; a text that has ended stays in the batch.
    while open_:
        outputs = forward(_pad_batch(texts, length, device))
        logits = outputs["logits"] if hasattr(outputs, "keys") else outputs[0]
        last = torch.stack([logits[row, len(text) - 1] for row, text in enumerate(texts)]).float()  # [N, V]
        tokens = agree(_draw_tokens(last, temperature, top_p))  # all ranks append the same tokens
        for row in sorted(open_):
            texts[row].append(tokens[row])
            if tokens[row] in ends or len(texts[row]) >= length:
                open_.discard(row)
    return texts


def tokens_of(prompts: Any, tokenizer: Any) -> list[list[int]]:
    """Prompts as tokens. Texts go through the tokenizer; tensors and lists stay as they are.

    Raises:
        InputError: if they are neither, or empty.
    """
    inputs = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(inputs, torch.Tensor):
        inputs = inputs.tolist() if inputs.dim() == 2 else [inputs.tolist()]
    rows = []
    for prompt in inputs:
        if isinstance(prompt, str):
            if not callable(tokenizer):
                raise InputError("generate: text prompts need processing_class, a tokenizer.")
            prompt = tokenizer(prompt)["input_ids"]
        rows.append([int(token) for token in prompt])
    if not rows or not all(rows):
        raise InputError("generate: a prompt must have at least one token.")
    return rows


def ends_of(model: nn.Module) -> frozenset[int]:
    """The tokens that end a text."""
    config: Any = getattr(model, "generation_config", None) or getattr(model, "config", None)
    eos = getattr(config, "eos_token_id", None)
    return frozenset(eos if isinstance(eos, (list, tuple)) else () if eos is None else (eos,))


def _pad_batch(texts: list[list[int]], length: int, device: torch.device) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    width = max(longest, min(length, -(-longest // _ROUND) * _ROUND))  # rounded up, at most length
    rows = [text + [text[-1]] * (width - len(text)) for text in texts]  # the mask hides what is padded
    mask = [[1] * len(text) + [0] * (width - len(text)) for text in texts]
    return {
        "input_ids": torch.tensor(rows, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def _draw_tokens(logits: torch.Tensor, temperature: float, top_p: float) -> list[int]:
    if temperature == 0:
        return [int(token) for token in logits.argmax(-1)]
    likely, order = torch.softmax(logits / temperature, -1).sort(dim=-1, descending=True)
    before = likely.cumsum(-1) - likely  # probability of all likelier tokens
    nucleus = torch.where(before < top_p, likely, torch.zeros_like(likely))  # nucleus sampling
    return [int(token) for token in order.gather(-1, torch.multinomial(nucleus, 1)).squeeze(-1)]


def tokens_alone(tokens: list[int]) -> dict[str, torch.Tensor]:
    """A text as a batch."""
    ids = torch.tensor([tokens])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
