"""BERT learns to guess hidden characters of English text on ranks that divide it: see README.md."""

from __future__ import annotations

from char_text import VOCABULARY_SIZE, Text, arguments
from transformers import BertConfig, BertForMaskedLM, EvalPrediction, set_seed

from atorch_ns.merak import MerakTrainer


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """The share of hidden characters that the likeliest guess is right for."""
    hidden = found.label_ids != -100
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids)[hidden].mean())}


def main() -> None:
    """Trains and evaluates with a metric."""
    args = arguments()
    set_seed(args.seed)
    config = BertConfig(
        vocab_size=VOCABULARY_SIZE,
        max_position_embeddings=128,
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    trainer = MerakTrainer(
        BertForMaskedLM(config),
        args,
        train_dataset=Text("train", hide=0.15),
        eval_dataset=Text("eval", hide=0.15),
        compute_metrics=accuracy,
    )
    trainer.model_accepts_loss_kwargs = False  # BERT's own loss is the mean over its batch
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(trainer.result.report)
        print(f"hidden characters guessed rightly: {metrics['eval_accuracy']:.0%}")


if __name__ == "__main__":
    main()
