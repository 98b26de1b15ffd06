"""GPT-2 learns English text character by character on ranks that divide it: see README.md."""

from __future__ import annotations

import torch
from char_text import VOCABULARY_SIZE, Text, arguments
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from atorch_ns.merak import MerakTrainer


def main() -> None:
    """Trains, evaluates, continues a text, and saves a folder that from_pretrained reads."""
    args = arguments()
    set_seed(args.seed)
    config = GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_positions=128,
        n_embd=96,
        n_layer=4,
        n_head=4,
        bos_token_id=10,
        eos_token_id=0,
    )
    trainer = MerakTrainer(
        GPT2LMHeadModel(config), args, train_dataset=Text("train"), eval_dataset=Text("eval")
    )
    trainer.train()
    metrics = trainer.evaluate()
    (text,) = trainer.generate(torch.tensor([list(b"The ")]), out_seq_length=64, temperature=0.5)
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(trainer.result.report)
        print(f"loss on text that was not trained on: {metrics['eval_loss']:.2f}")
        print(repr(bytes(token % 256 for token in text).decode(errors="replace")))


if __name__ == "__main__":
    main()
