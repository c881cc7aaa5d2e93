# SPDX-License-Identifier: Apache-2.0
"""A script for TRL's SFTTrainer, made elastic by the mix-in, as jobs run it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import transformers_script as script
from elasticdl import _state
from elasticdl.transformers import ElasticMixin
from faults import Faults


class Trainer(ElasticMixin, SFTTrainer):
    pass


def main(folder: Path, n_workers: int, kills: list[int]) -> None:
    words = Tokenizer(models.WordLevel({str(n): n for n in range(script.N_VOCABULARY)}, "0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="0")
    args = SFTConfig(
        output_dir=str(folder / "output"),
        per_device_train_batch_size=script.BATCH,
        gradient_accumulation_steps=script.ACCUMULATION,
        num_train_epochs=script.EPOCHS,
        learning_rate=0.01,
        logging_steps=2,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    texts = Dataset.from_list(script.texts(script.N_RECORDS, seed=1))
    model = script.make_model("gpt2")
    callbacks = [script.Interrupted(Faults(folder, n_workers, kills))]
    trainer = Trainer(
        model, args, train_dataset=texts, processing_class=tokenizer, callbacks=callbacks
    )
    trainer.train()
    states = {"model": model.state_dict(), "step": trainer.state.global_step}
    (folder / f"end-{os.getpid()}").write_bytes(_state.dump(states))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(kill) for kill in sys.argv[3:]])
