"""What users have found: models and settings that were wrong or refused in other words."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import Trainer

from atorch_ns.checkpoint import export_state_dict
from atorch_ns.errors import CheckpointError, InputError, RankError
from atorch_ns.merak import MerakArguments, MerakTrainer, init
from atorch_ns.testing.workers import run_ranks
from tests.merak.parts import VOCABULARY, Data, assert_equal_runs, model, run_merak, run_plain

_TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
}


class Pairs(torch.utils.data.Dataset[dict[str, Any]]):
    """Texts and pictures."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> dict[str, Any]:
        draws = torch.Generator().manual_seed(place)
        ids = torch.randint(3, 90, (8,), generator=draws)
        ids[-1] = 2
        return {"input_ids": ids, "pixel_values": torch.randn(3, 16, 16, generator=draws)}


def matched(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: torch.stack([one[key] for one in samples]) for key in samples[0]} | {"return_loss": True}


def evaluated_clip(merak: bool) -> float:
    """The loss of CLIP, whose outputs come from two towers; attention dropout is off, as it is by default."""
    config = transformers.CLIPConfig(
        text_config={**_TINY, "vocab_size": 96, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**_TINY, "image_size": 16, "patch_size": 4},
        projection_dim=16,
    )
    torch.manual_seed(0)
    clip = transformers.CLIPModel(config)
    fields: dict[str, Any] = {
        "per_device_eval_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    given: dict[str, Any] = {"eval_dataset": Pairs(), "data_collator": matched}
    if merak:
        init(pp=2)
        trainer: Trainer = MerakTrainer(clip, MerakArguments("unused", **fields, label_names=[]), **given)
    else:
        args = transformers.TrainingArguments("unused", **fields, label_names=[])
        trainer = Trainer(clip, args, **given)
    return float(trainer.evaluate()["eval_loss"])


@pytest.mark.timeout(150)
def test_a_model_of_two_towers_is_evaluated_over_stages() -> None:
    (wanted,) = run_ranks(evaluated_clip, 1, args=(False,), timeout_s=60)
    assert run_ranks(evaluated_clip, 2, args=(True,), timeout_s=60) == [pytest.approx(wanted, abs=1e-5)] * 2


@pytest.mark.timeout(150)
def test_labels_are_shifted_in_an_evaluation_with_label_smoothing() -> None:
    smoothed = {"label_smoothing_factor": 0.1}
    (plain,) = run_ranks(functools.partial(run_plain, **smoothed), 1, args=("gpt2", 4), timeout_s=60)
    (found,) = run_ranks(functools.partial(run_merak, **smoothed), 1, args=("gpt2", {}, 4), timeout_s=60)
    assert_equal_runs(found, plain)


class Twice(MerakTrainer):
    """Calls the model two times for a loss."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        first, second = (model(**{**inputs, "labels": inputs["labels"] + n}) for n in (0, 1))
        return first["loss"] - second["loss"]


def refused(what: str) -> str:
    init(pp=2) if what == "neftune" else init(dp=1)
    fields = {"neftune": {"neftune_noise_alpha": 5.0}, "layers": {"num_layers": 3}}.get(what, {})
    args = MerakArguments("unused", report_to=[], disable_tqdm=True, max_steps=1, **fields)
    kind = Twice if what == "twice" else MerakTrainer
    given: dict[str, Any] = {"model": model("gpt2")} if what != "layers" else {"model_init": made}
    try:
        kind(args=args, train_dataset=Data("gpt2"), **given).train()
    except InputError as error:
        return str(error)
    return ""


def made() -> Any:
    return model("gpt2")


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("what", "words", "ranks"),
    [
        ("twice", "called the model again with", 1),
        ("layers", "num_layers=3, where the model's config has 4", 1),
        ("neftune", "neftune_noise_alpha", 2),
    ],
)
def test_what_would_be_wrong_is_refused(what: str, words: str, ranks: int) -> None:
    for text in run_ranks(refused, ranks, args=(what,), timeout_s=60):
        assert words in text


def resumed(folder: str, what: str) -> str:
    """What is said of a folder that ``save_pretrained`` has written, of an empty one, and of a damaged checkpoint."""
    init(pp=2)
    place = Path(folder) / what
    if dist.get_rank() == 0:
        place.mkdir()
        if what != "empty":
            model("gpt2").save_pretrained(place)
        if what == "damaged":
            (place / "trainer_state.json").write_text('{"global_step": ')
    dist.barrier()
    args = MerakArguments(folder, report_to=[], disable_tqdm=True, max_steps=1, learning_rate=0.0)
    torch.manual_seed(1)
    other = transformers.GPT2LMHeadModel(model("gpt2").config)
    trainer = MerakTrainer(other, args, train_dataset=Data("gpt2"))
    try:
        trainer.train(resume_from_checkpoint=str(place))
    except (CheckpointError, RankError) as error:
        return str(error)
    weights = export_state_dict(trainer.result)
    wanted = model("gpt2").state_dict()
    return (
        "" if all(torch.equal(weight, wanted[name]) for name, weight in weights.items()) else "other weights"
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("what", "words"), [("pretrained", ""), ("empty", "safetensors"), ("damaged", "is damaged")]
)
def test_a_folder_without_a_run_gives_its_weights(what: str, words: str, tmp_path: Path) -> None:
    for text in run_ranks(resumed, 2, args=(str(tmp_path), what), timeout_s=80):
        assert words in text
        assert bool(text) == bool(words)


@pytest.mark.timeout(120)
def test_a_last_step_with_fewer_micro_batches_than_the_schedule_takes_is_filled_up() -> None:
    """40 samples in steps of 12: the last step of an epoch has two of its six micro-batches."""
    fields = {"max_steps": 4, "max_grad_norm": 0.5}
    (plain,) = run_ranks(functools.partial(run_plain, **fields), 1, args=("gpt2", 6), timeout_s=60)
    merak = functools.partial(run_merak, **fields, train_schedule="dualpipe_v", partition_method="auto")
    assert_equal_runs(run_ranks(merak, 2, args=("gpt2", {"pp": 2}, 6), timeout_s=60)[0], plain)


def train_albert() -> tuple[float, str]:
    init(dp=1)
    config = transformers.AlbertConfig(
        **{**_TINY, "attention_dropout": 0.0},
        embedding_size=16,
        vocab_size=VOCABULARY,
        num_labels=3,
        max_position_embeddings=16,
    )
    args = MerakArguments("unused", report_to=[], disable_tqdm=True, max_steps=2)
    albert = transformers.AlbertForSequenceClassification(config)
    trainer = MerakTrainer(albert, args, train_dataset=Data("bert"))
    return trainer.train().training_loss, str(trainer.result.report)


@pytest.mark.timeout(60)
def test_a_model_that_repeats_no_block_trains_without_recomputation() -> None:
    ((loss, report),) = run_ranks(train_albert, 1, timeout_s=50)
    assert loss > 0.0
    assert "the model repeats no block" in report
