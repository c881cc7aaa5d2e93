# SPDX-License-Identifier: Apache-2.0
"""A script for Hugging Face's Trainer, as jobs and the tests run it.

A tiny GPT-2 or BERT with random weights, with dropout, gradient accumulation, evaluations, early
stopping and checkpoints. Texts have different lengths, so lanes have different numbers of tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import torch
import transformers
from transformers import TrainerCallback, TrainingArguments

from elasticdl import ZooError, _state, _torch_flat
from elasticdl.transformers import ElasticTrainer as Trainer
from faults import Faults

N_LANES, BATCH, ACCUMULATION, EPOCHS = 3, 2, 2, 2
LANE = BATCH * ACCUMULATION
# The last step of an epoch has fewer records.
N_RECORDS, N_VOCABULARY, N_LABELS = 53, 40, 3
STEPS_PER_EPOCH = -(-N_RECORDS // (N_LANES * LANE))
N_STEPS = EPOCHS * STEPS_PER_EPOCH


def texts(n_texts: int, seed: int) -> list[dict[str, list[int]]]:
    """Random texts; the first token counts the texts."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for number in range(n_texts):
        length = int(torch.randint(3, 9, (), generator=random))
        words = torch.randint(0, N_VOCABULARY, (length,), generator=random).tolist()
        found.append({"input_ids": [number % N_VOCABULARY, number // N_VOCABULARY, *words]})
    return found


def collate(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(item["input_ids"]) for item in items)
    rows = [item["input_ids"] + [-1] * (width - len(item["input_ids"])) for item in items]
    ids = torch.tensor(rows)
    labels = ids.masked_fill(ids < 0, -100)
    if "label" in items[0]:
        labels = torch.tensor([item["label"] for item in items])
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(), "labels": labels}


def make_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=N_VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=16, num_labels=N_LABELS,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)
    dropout = 0.0 if kind == "still" else 0.1
    config = transformers.GPT2Config(
        vocab_size=N_VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        config = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        model = get_peft_model(model, config)
    return model


def data(kind: str) -> tuple[list, list]:
    trained, evaluated = texts(N_RECORDS, seed=1), texts(7, seed=2)
    if kind == "bert":
        for item in [*trained, *evaluated]:
            item["label"] = sum(item["input_ids"]) % N_LABELS
    return trained, evaluated


def arguments(kind: str, folder: Path, **options: object) -> TrainingArguments:
    chosen = {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "num_train_epochs": EPOCHS,
        "train_sampling_strategy": "sequential",
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "logging_steps": 2,
        "dataloader_num_workers": 1,
        "eval_strategy": "epoch",
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "bf16": kind == "bert",
        "activation_checkpointing": kind == "bert",
        "disable_tqdm": True,
        "optim": "sgd" if kind == "still" else "adamw_torch",
    }
    return TrainingArguments(output_dir=str(folder / "output"), **{**chosen, **options})


class Counter(TrainerCallback):
    """A callback with state: what it has seen."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def state_dict(self) -> dict:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict) -> None:
        self.seen = list(state["seen"])

    def on_epoch_begin(self, _args, state, _control, **_) -> None:
        self.seen.append(f"epoch {state.epoch:.3f}")

    def on_step_end(self, _args, state, _control, **_) -> None:
        self.seen.append(f"step {state.global_step} {state.epoch:.3f}")

    def on_evaluate(self, _args, state, _control, metrics, **_) -> None:
        torch.rand(3)  # Random numbers outside the step do not matter.
        self.seen.append(f"loss {metrics['eval_loss']:.6f} {state.global_step}")


def plain(kind: str, folder: Path, seeds: dict[str, int]) -> torch.nn.Module:
    """Trains without a job, on the same lanes, and with the same random numbers in each of them."""
    _torch_flat.make_repeatable(1)
    model, (records, evaluated) = make_model(kind), data(kind)
    trainer = transformers.Trainer(model, arguments(kind, folder), collate, records, evaluated)
    optimizer, scheduler = trainer.create_optimizer(), trainer.create_scheduler(N_STEPS)
    model = trainer.accelerator.prepare(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(N_STEPS):
        first = step % STEPS_PER_EPOCH * N_LANES * LANE
        end = min(first + N_LANES * LANE, N_RECORDS)
        # The last step of an epoch is shared out evenly, with at least two records for each lane.
        n_lanes = min(N_LANES, (end - first) // 2)
        borders = [first + (end - first) * lane // n_lanes for lane in range(n_lanes + 1)]
        lanes = [records[a:b] for a, b in itertools.pairwise(borders)]
        sums = [lane_sum(trainer, model, trained, lane, seeds, step) for lane in lanes]
        total = sums[0]
        for other in sums[1:]:
            total = [a + b for a, b in zip(total, other)]
        *gradients, tokens = [part / (end - first) for part in total]
        scale = 1 / tokens.item() if tokens else 1.0
        for parameter, gradient in zip(trained, gradients):
            parameter.grad = gradient * scale if tokens else gradient
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        scheduler.step()
    return model


def lane_sum(trainer, model, trained, lane, seeds, step) -> list[torch.Tensor]:
    """The gradient of a lane times its records, and its tokens."""
    model.train()
    model.zero_grad()
    batches = [collate(lane[at : at + BATCH]) for at in range(0, len(lane), BATCH)]
    if seeds:
        torch.manual_seed(seeds[json.dumps([step, lane[0]["input_ids"][:2]])])
    n_tokens = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    for batch in batches:
        if n_tokens is None:
            loss = model(**batch).loss / len(batches)
        else:
            loss = model(**batch, num_items_in_batch=n_tokens).loss
        loss.backward()
    tokens = 0.0 if n_tokens is None else float(n_tokens) / len(lane)
    scale = 1.0 if n_tokens is None else tokens
    gradients = [parameter.grad * scale for parameter in trained]
    return [part * len(lane) for part in [*gradients, torch.tensor(tokens)]]


class Interrupted(TrainerCallback):
    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def on_step_end(self, _args, state, _control, **_) -> None:
        # The leader, before it logs what belongs to the step.
        self._faults.between(state.global_step, state.is_world_process_zero)


def note_seeds(model: torch.nn.Module, folder: Path) -> None:
    """Writes the seed of the first batch of each lane, with the numbers of its first text."""

    def note(module, args, kwargs) -> None:
        if module.training and not model.job.is_described:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            with (folder / f"seeds-{os.getpid()}").open("a") as file:
                print(json.dumps([step(), ids[0, :2].tolist(), torch.initial_seed()]), file=file)

    def step() -> int:
        return model.job.step

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    body = base.transformer if hasattr(base, "transformer") else base.bert
    body.register_forward_pre_hook(note, with_kwargs=True)


def main(kind: str, folder: Path, n_workers: int, kills: list[int]) -> None:
    model = make_model(kind)
    trained, evaluated = data(kind)
    counter = Counter()
    callbacks = [counter, Interrupted(Faults(folder, n_workers, kills))]
    note_seeds(model, folder)
    trainer = Trainer(
        model, arguments(kind, folder), collate, trained, evaluated, callbacks=callbacks
    )
    object.__setattr__(model, "job", trainer.job)
    done = trainer.train(resume_from_checkpoint=os.environ.get("RESUMED"))
    trainer.save_model(str(folder / "saved"))
    states = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": {"lr": trainer.lr_scheduler.get_last_lr()},
        "seen": counter.seen,
        "logs": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "end": [done.global_step, done.training_loss, trainer.state.epoch],
    }
    try:
        trainer.train()
    except ZooError as error:
        states["again"] = str(error)
    (folder / f"end-{os.getpid()}").write_bytes(_state.dump(states))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), [int(kill) for kill in sys.argv[4:]])
