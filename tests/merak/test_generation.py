"""Text generation by a divided model, held against ``model.generate``."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from atorch_ns.errors import InputError
from atorch_ns.merak import MerakArguments, MerakTrainer, init
from atorch_ns.testing.workers import catch_ranks, run_ranks
from tests.merak.parts import model

PROMPTS = [[5, 17, 9, 33], [7, 8], [60]]
LENGTH = 16


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        """The tokens of a text."""
        return {"input_ids": [ord(letter) - 60 for letter in text]}

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return "".join(chr(token + 60) for token in tokens)


def generator(name: str, degrees: dict[str, Any], folder: str, **fields: Any) -> MerakTrainer:
    """A trainer that generates, and has no data."""
    init(**degrees)
    given = {"use_cpu": True, "report_to": [], "text_generation": True, **fields}
    # Dropout is the model's own: generation turns it off.
    return MerakTrainer(
        model(name, dropout=True), MerakArguments(folder, **given), processing_class=Letters()
    )


@functools.cache
def plain(name: str) -> list[list[int]]:
    """What ``model.generate`` continues each prompt with, greedily."""
    (found,) = run_ranks(_plain, 1, args=(name,), timeout_s=60)
    return found


def _plain(name: str) -> list[list[int]]:
    whole: Any = model(name, dropout=True)
    whole.eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        text = whole.generate(ids, attention_mask=torch.ones_like(ids), max_length=LENGTH, do_sample=False)
        found.append(text[0].tolist())
    return found


def _generated(name: str, degrees: dict[str, Any], folder: str) -> dict[str, Any]:
    trainer = generator(name, degrees, folder, temperature=0.0, out_seq_length=LENGTH)
    torch.manual_seed(100 + int(torch.distributed.get_rank()))  # ranks draw differently unless they agree
    return {
        "greedy": trainer.generate(PROMPTS),
        "tensor": trainer.generate(torch.tensor([PROMPTS[0]])),
        "sampled": trainer.generate(PROMPTS, temperature=1.0),
        "again": trainer.generate(PROMPTS, temperature=1.0),
        "short": trainer.generate(PROMPTS, out_seq_length=6),
        "text": trainer.generate("hello"),
        "texts": trainer.generate(["hello", "you"], out_seq_length=8),
    }


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("gpt2", {"pp": 2}),
        ("llama", {"tp": 2}),
        pytest.param("llama", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("opt", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"dp": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"pp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_the_whole_model(name: str, degrees: dict[str, Any], tmp_path: Any) -> None:
    ranks = 4 if len(degrees) == 2 else 2
    every = run_ranks(_generated, ranks, args=(name, degrees, str(tmp_path)), timeout_s=150)
    first = every[0]
    assert all(found == first for found in every)
    assert first["greedy"] == plain(name)
    assert first["tensor"] == plain(name)[:1]
    assert first["short"] == [
        text[: max(6, len(prompt))] for text, prompt in zip(plain(name), PROMPTS, strict=True)
    ]
    assert first["sampled"] != first["greedy"]
    assert first["sampled"] != first["again"]
    for text, prompt in zip(first["sampled"], PROMPTS, strict=True):
        assert text[: len(prompt)] == prompt
        assert len(text) == LENGTH or text[-1] == 2  # the token that ends texts
    assert first["text"][0].startswith("hello")
    assert [len(text) <= 8 for text in first["texts"]] == [True, True]


def _lengths(folder: str) -> tuple[list[int], list[list[int]]]:
    longest = generator("gpt2", {"pp": 2}, f"{folder}/longest", temperature=0.0)
    hot = generator("gpt2", {"pp": 2}, f"{folder}/hot", temperature=5.0, out_seq_length=10)
    return [len(text) for text in longest.generate(PROMPTS[:1])], hot.generate(PROMPTS[:1])


@pytest.mark.timeout(100)
def test_length_and_temperature_are_those_of_the_arguments(tmp_path: Any) -> None:
    lengths, hot = run_ranks(_lengths, 2, args=(str(tmp_path),), timeout_s=80)[0]
    assert lengths == [32]  # out_seq_length is 1024, and the model has 32 positions
    assert len(hot[0]) <= 10
    assert hot[0] != plain("gpt2")[0][:10]  # temperature 5 is not the likeliest


def _wrongly(folder: str, name: str, prompts: Any) -> None:
    trainer = generator(name, {"pp": 2}, folder)
    if prompts == "train":
        trainer.train()
    trainer.generate(prompts)


@pytest.mark.parametrize(
    ("name", "prompts", "said"),
    [
        ("gpt2", [[]], "a prompt must have at least one token"),
        ("gpt2", [], "a prompt must have at least one token"),
        ("t5", [[5]], "this one has an encoder"),
        ("gpt2", "train", "text_generation is for trainer.generate"),
    ],
)
def test_what_cannot_be_continued_is_refused(name: str, prompts: Any, said: str, tmp_path: Any) -> None:
    for outcome in catch_ranks(_wrongly, 2, args=(str(tmp_path), name, prompts), timeout_s=60):
        assert isinstance(outcome.error, InputError), outcome.describe()
        assert said in str(outcome.error)
