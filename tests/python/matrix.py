# SPDX-License-Identifier: Apache-2.0
"""Short scripts of PyTorch and of its libraries, and the lines that make each of them elastic.

A script saves its model at the end in the file that OUT names. It draws no random numbers after its
start, so that it has the same bits with and without a job.
"""

from __future__ import annotations

import difflib
import textwrap
from dataclasses import dataclass

# The most lines that may change.
LOOP_LINES, TRAINER_LINES = 6, 2


@dataclass(frozen=True)
class Case:
    """A script, and what changes in it: lines, by their text, and what takes their place."""

    plain: str
    changes: dict[str, str]
    # The libraries that it needs, besides torch.
    needs: tuple[str, ...] = ()
    is_trainer: bool = False

    @property
    def elastic(self) -> str:
        lines = []
        left = dict(self.changes)
        for line in self.plain.splitlines():
            text = line.strip()
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(textwrap.indent(left.pop(text), indent) if text in left else line)
        assert not left, f"the script has no line {min(left)!r}"
        return "\n".join(lines) + "\n"

    @property
    def limit(self) -> int:
        return TRAINER_LINES if self.is_trainer else LOOP_LINES

    def n_changed(self) -> int:
        """Lines that were added, replaced or removed."""
        lines = [*difflib.ndiff(self.plain.splitlines(), self.elastic.splitlines())]
        return max(sum(line.startswith(sign) for line in lines) for sign in ("+ ", "- "))


def script(text: str) -> str:
    return textwrap.dedent(text).lstrip()


def loop(
    plain: str,
    dataset: str = "dataset",
    init: str = "model, optimizer",
    extra: dict[str, str] | None = None,
    needs: tuple[str, ...] = (),
) -> Case:
    """A script with a loop over `loader`, which takes its own steps."""
    changes = {
        "import torch": "import torch\nimport elasticdl",
        "for epoch in range(EPOCHS):": f"job = elasticdl.init({init})\n"
        "for epoch in job.epochs(EPOCHS):",
        "for x, y in loader:": f"for x, y in job.batches({dataset}, batch_size=BATCH, "
        "shuffle=False):",
        "loss.backward()": "loss.backward()\njob.allreduce(model, loss)",
    }
    return Case(script(plain), {**changes, **(extra or {})}, needs)


# PyTorch's example for MNIST: two convolutions, Adadelta, and a rate that shrinks in every epoch.
MNIST = """
    import os
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    EPOCHS, BATCH = 3, 4
    torch.manual_seed(0)
    y = torch.arange(96) % 10
    x = torch.randn(10, 1, 28, 28)[y] + torch.randn(96, 1, 28, 28)
    dataset = TensorDataset(x, y)
    loader = DataLoader(dataset, batch_size=BATCH)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(576, 32), nn.ReLU(), nn.Linear(32, 10), nn.LogSoftmax(1),
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
    torch.save(model.state_dict(), os.environ["OUT"])
"""

# A transformer of letters: groups with and without decay, clipping, and a rate by step.
GPT = """
    import math
    import os
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    EPOCHS, BATCH, WIDTH, LENGTH, N_LETTERS = 3, 4, 32, 16, 27

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attend = nn.Linear(WIDTH, 3 * WIDTH)
            self.mix = nn.Linear(WIDTH, WIDTH)
            self.think = nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )

        def forward(self, x):
            parts = self.attend(self.before(x)).chunk(3, 2)
            q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in parts)
            seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.mix(seen.transpose(1, 2).flatten(2))
            return x + self.think(self.after(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.letters = nn.Embedding(N_LETTERS, WIDTH)
            self.places = nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
            self.head = nn.Linear(WIDTH, N_LETTERS, bias=False)
            self.head.weight = self.letters.weight

        def forward(self, x):
            x = self.letters(x) + self.places(torch.arange(x.shape[1]))
            return self.head(self.blocks(x))

    torch.manual_seed(0)
    text = torch.randint(N_LETTERS, (96, LENGTH + 1))
    dataset = TensorDataset(text[:, :-1], text[:, 1:])
    loader = DataLoader(dataset, batch_size=BATCH)
    model = Model()
    groups = [[p for p in model.parameters() if (p.dim() < 2) == flat] for flat in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}], lr=0.01
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: math.cos(n / 100))
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    torch.save(model.state_dict(), os.environ["OUT"])
"""

# Images, for models of libraries.
IMAGES = """
    import os
    import torch
    {imports}
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    EPOCHS, BATCH = 2, 4
    torch.manual_seed(0)
    y = torch.arange(96) % 4
    x = torch.randn(4, 3, 32, 32)[y] + torch.randn(96, 3, 32, 32)
    dataset = TensorDataset(x, y)
    loader = DataLoader(dataset, batch_size=BATCH)
    model = {model}
    optimizer = {optimizer}
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), os.environ["OUT"])
"""
RESNET = IMAGES.format(
    imports="import torchvision",
    model="torchvision.models.resnet18(num_classes=4)",
    optimizer="torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)",
)
TIMM = IMAGES.format(
    imports="import timm.optim",
    model='timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, '
    "num_classes=4)",
    optimizer='timm.optim.create_optimizer_v2(model, "lamb", lr=0.01)',
)

# A model that finds the noise in an image; the noise of each record is part of the data.
UNET = """
    import os
    import torch
    from diffusers import DDPMScheduler, UNet2DModel
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    EPOCHS, BATCH = 2, 4
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )
    noise, times = torch.randn(96, 1, 16, 16), torch.randint(1000, (96,))
    noisy = DDPMScheduler().add_noise(torch.rand(96, 1, 16, 16), noise, times)
    dataset = TensorDataset(noisy, torch.arange(96))
    loader = DataLoader(dataset, batch_size=BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x, times[y]).sample, noise[y])
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), os.environ["OUT"])
"""

# Recommendations: bags of categories and numbers, two optimizers.
DLRM = """
    import os
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    EPOCHS, BATCH = 3, 4

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(1000, 8, mode="sum") for _ in range(3))
            self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
            self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x):
            numbers = self.bottom(x[:, :4])
            ids = x[:, 4:].long().unflatten(1, (3, 2))
            found = torch.stack([numbers, *(bag(ids[:, n]) for n, bag in enumerate(self.bags))], 1)
            pairs = (found @ found.transpose(1, 2))[:, *torch.triu_indices(4, 4, 1)]
            return self.top(torch.cat([numbers, pairs], 1)).squeeze(1)

    torch.manual_seed(0)
    x = torch.cat([torch.randn(96, 4), torch.randint(1000, (96, 6)).float()], 1)
    dataset = TensorDataset(x, (x[:, 0] + x[:, 4] / 1000 > 0.5).float())
    loader = DataLoader(dataset, batch_size=BATCH)
    model = Model()
    optimizer = torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=0.01)
    tables = torch.optim.Adagrad(model.bags.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        for x, y in loader:
            model.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            optimizer.step()
            tables.step()
    torch.save(model.state_dict(), os.environ["OUT"])
"""

# The rest of scripts about data: `dataset` and `loader` give vectors and labels.
CLASSIFY = """
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), os.environ["OUT"])
"""
WEBDATASET = """
    import os
    import torch
    import numpy as np
    import webdataset
    from torch import nn
    from torch.utils.data import DataLoader

    EPOCHS, BATCH = 3, 4
    torch.manual_seed(0)
    tars = [f"{os.environ['DATA']}/{shard}.tar" for shard in range(3)]

    def decode(record):
        return np.frombuffer(record["x"], np.float32).copy(), int(record["cls"])

    dataset = webdataset.WebDataset(tars, shardshuffle=False).map(decode)
    loader = DataLoader(dataset, batch_size=BATCH)
""" + CLASSIFY.lstrip("\n")
MDS = """
    import os
    import torch
    from streaming import StreamingDataset
    from torch import nn
    from torch.utils.data import DataLoader

    EPOCHS, BATCH = 3, 4
    torch.manual_seed(0)
    folder = f"{os.environ['DATA']}/mds"

    def pair(record):
        return record["x"], record["y"]

    def collate(records):
        return torch.utils.data.default_collate([pair(record) for record in records])

    dataset = StreamingDataset(local=folder, shuffle=False, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, collate_fn=collate)
""" + CLASSIFY.lstrip("\n")
TORCHDATA = """
    import os
    import torch
    from torch import nn
    from torch.utils.data import IterableDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    EPOCHS, BATCH, N_RECORDS = 3, 4, 96
    torch.manual_seed(0)
    vectors = torch.randn(N_RECORDS, 6)

    class Lines(IterableDataset):
        def __init__(self, lane=0, n_lanes=1):
            self.records, self.place = range(lane, N_RECORDS, n_lanes), 0

        def __iter__(self):
            while self.place < len(self.records):
                self.place += 1
                x = vectors[self.records[self.place - 1]]
                yield x, (x.sum() > 0).long()
            self.place = 0

        def state_dict(self):
            return {"place": self.place}

        def load_state_dict(self, state):
            self.place = state["place"]

    loader = StatefulDataLoader(Lines(), batch_size=BATCH)
""" + CLASSIFY.lstrip("\n")

LANGUAGE = """
    import os
    import torch
    import transformers
    from transformers import TrainingArguments
    from transformers import Trainer
    {imports}

    torch.manual_seed(0)
    texts = torch.randint(40, (96, 9), generator=torch.Generator().manual_seed(1))
    model = {model}
    dataset = [{record} for text in texts]
    args = TrainingArguments(
        os.environ["OUT"] + ".folder", per_device_train_batch_size=4, num_train_epochs=2,
        train_sampling_strategy="sequential", learning_rate=0.01, weight_decay=0.1, warmup_steps=3,
        average_tokens_across_devices=False, logging_steps=4, save_steps=9, report_to=[],
        use_cpu=True, disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=dataset)
    trainer.train()
    torch.save(model.state_dict(), os.environ["OUT"])
"""
GPT2_MODEL = (
    "transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, "
    "n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))"
)
BERT_MODEL = (
    "transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=40, "
    "hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, "
    "hidden_dropout_prob=0, attention_probs_dropout_prob=0))"
)
TEXT = '{"input_ids": text, "labels": text}'
LABELLED = '{"input_ids": text, "labels": text[0] % 2}'
LORA_MODEL = (
    f'get_peft_model({GPT2_MODEL}, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))'
)
HUGGING_FACE = {
    "from transformers import Trainer": "from elasticdl.transformers import ElasticTrainer as "
    "Trainer"
}
TRL = f"""
    import os
    import torch
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    class Trainer(SFTTrainer):
        pass

    torch.manual_seed(0)
    texts = torch.randint(40, (96, 9), generator=torch.Generator().manual_seed(1))
    words = Tokenizer(models.WordLevel({{str(n): n for n in range(40)}}, "0"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="0", eos_token="0"
    )
    model = {GPT2_MODEL}
    args = SFTConfig(
        os.environ["OUT"] + ".folder", per_device_train_batch_size=4, num_train_epochs=2,
        train_sampling_strategy="sequential", learning_rate=0.01, logging_steps=4, report_to=[],
        average_tokens_across_devices=False, use_cpu=True, bf16=False, disable_tqdm=True,
    )
    dataset = Dataset.from_list([{{"input_ids": text}} for text in texts.tolist()])
    trainer = Trainer(model, args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    torch.save(model.state_dict(), os.environ["OUT"])
"""
LIGHTNING = """
    import os
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 2))

        def training_step(self, batch, number):
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    torch.manual_seed(0)
    x = torch.randn(96, 6)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4)
    trainer = Trainer(
        accelerator="cpu", max_epochs=3,
        gradient_clip_val=0.5, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, loader)
    torch.save(model.state_dict(), os.environ["OUT"])
"""
ACCELERATE = """
    import os
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    torch.save(model.state_dict(), os.environ["OUT"])
"""


def trainer(plain: str, changes: dict[str, str], *needs: str) -> Case:
    return Case(script(plain), changes, needs, is_trainer=True)


def language(model: str, record: str, imports: str = "", *needs: str) -> Case:
    plain = LANGUAGE.format(model=model, record=record, imports=imports)
    return trainer(plain, HUGGING_FACE, "transformers", *needs)


MDS_LINE = "dataset = StreamingDataset(local=folder, shuffle=False, batch_size=BATCH)"
IMPORTS_DATA = {"import torch": "import torch\nimport elasticdl.data"}
CASES = {
    "mnist": loop(MNIST, init="model, optimizer, scheduler=scheduler"),
    "gpt": loop(GPT, init="model, optimizer, scheduler=scheduler"),
    "resnet18": loop(RESNET, needs=("torchvision",)),
    "timm": loop(TIMM, needs=("timm",)),
    "unet": loop(UNET, needs=("diffusers",)),
    "dlrm": loop(DLRM, init="model, optimizer, tables=tables"),
    "webdataset": loop(
        WEBDATASET,
        extra={
            **IMPORTS_DATA,
            "dataset = webdataset.WebDataset(tars, shardshuffle=False).map(decode)": "dataset = "
            "elasticdl.data.shards(tars, map=decode)",
        },
        needs=("webdataset",),
    ),
    "mds": loop(
        MDS,
        extra={
            **IMPORTS_DATA,
            MDS_LINE: "dataset = elasticdl.data.shards([folder], map=pair)",
        },
        needs=("streaming",),
    ),
    "torchdata": loop(
        TORCHDATA,
        dataset="stream",
        extra={
            **IMPORTS_DATA,
            "loader = StatefulDataLoader(Lines(), batch_size=BATCH)": "stream = "
            "elasticdl.data.stream(lambda *lane: StatefulDataLoader(Lines(*lane), "
            "batch_size=BATCH), epoch_steps=N_RECORDS // BATCH // "
            "int(os.environ['ELASTICDL_LANES']), at_least_once=True)",
        },
        needs=("torchdata",),
    ),
    "gpt2": language(GPT2_MODEL, TEXT),
    "bert": language(BERT_MODEL, LABELLED),
    "lora": language(LORA_MODEL, TEXT, "from peft import LoraConfig, get_peft_model", "peft"),
    "trl": trainer(
        TRL,
        {
            "from trl import SFTConfig, SFTTrainer": "from trl import SFTConfig, SFTTrainer\n"
            "from elasticdl.transformers import ElasticMixin",
            "class Trainer(SFTTrainer):": "class Trainer(ElasticMixin, SFTTrainer):",
        },
        "trl",
    ),
    "lightning": trainer(
        LIGHTNING,
        {
            "import torch": "import torch\nimport elasticdl.lightning",
            'accelerator="cpu", max_epochs=3,': 'accelerator="cpu", strategy="elasticdl", '
            "max_epochs=3,",
        },
        "lightning",
    ),
    "accelerate": trainer(
        ACCELERATE,
        {
            "from accelerate import Accelerator": "from elasticdl.accelerate import Accelerator",
            "for epoch in range(3):": "for epoch in accelerator.epochs(3):",
        },
        "accelerate",
    ),
}
