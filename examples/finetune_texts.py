"""Fine-tune a pretrained encoder on texts of eight clients: adapters for all, adapters of one's own, and each client alone.

    python examples/finetune_texts.py                                    # a tiny random encoder on made-up mails: seconds
    python examples/finetune_texts.py --model MiniLM --texts mails       # a folder of transformers; one of texts by class

`--texts` has a folder for each class with a file for each text. Classes are divided by Dirichlet(0.3). Needs `peft` and
`transformers`.
"""

import argparse
import random
from pathlib import Path
from typing import Any

from fedlightning import FederatedTrainer  # before lightning

# isort: split
import peft
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from fedlightning.callbacks import FedIT, FedSALoRA, Local
from fedlightning.datamodules import ByteTokenizer, DirichletPartitioner, TextDataModule
from fedlightning.models import HFModule
from fedlightning.seeding import generator

MADE_UP = {
    "ham": ["see you at noon", "the notes are in the folder", "lunch on friday"],
    "spam": ["win money now", "free!!"],
}


def read_texts(folder: str | None) -> list[dict[str, Any]]:
    """Return rows with a text and the number of its class."""
    if folder is None:
        draw = random.Random(0)
        made = [(draw.choice(MADE_UP[kind]), label) for label, kind in enumerate(MADE_UP) for _ in range(120)]
        return [{"text": f"{text} {draw.randrange(10)}", "label": label} for text, label in made]
    classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    files = [(file, label) for label, path in enumerate(classes) for file in sorted(path.glob("*.*"))]
    return [{"text": file.read_text(errors="replace"), "label": label} for file, label in files]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--texts")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--out", default="runs/finetune_texts")
    given = parser.parse_args()

    rows = read_texts(given.texts)
    labels = torch.tensor([row["label"] for row in rows])
    plan = DirichletPartitioner(num_clients=8, alpha=0.3).plan(labels, generator(0, "clients"))
    clients = {}
    for client, indices in zip(plan.client_ids, plan.split(labels, generator(0, "clients")), strict=True):
        own = [
            rows[index] for index in torch.tensor(indices)[torch.randperm(len(indices), generator=generator(0, client))]
        ]
        fifth = max(1, len(own) // 5)
        clients[client] = own[2 * fifth :], own[:fifth], own[fifth : 2 * fifth]
    tokenizer = AutoTokenizer.from_pretrained(given.model) if given.model else ByteTokenizer()
    data = TextDataModule(clients, tokenizer, batch_size=16, max_length=given.max_length)

    head, targets, count = "model.classifier", ["query", "value"], int(labels.max()) + 1
    adapters = {"r": 8, "alpha": 16, "target_modules": targets, "head": head}
    for name, methods in {
        "FedIT": [FedIT(**adapters)],
        "FedSALoRA": [FedSALoRA(**adapters)],
        "Local": [Local()],
    }.items():
        torch.manual_seed(0)
        if given.model:
            model = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=count)
        else:
            sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
            config = BertConfig(vocab_size=258, pad_token_id=257, num_labels=count, **sizes)
            model = BertForSequenceClassification(config)
        if name == "Local":  # nothing travels, so that no method has to know which part would
            config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, modules_to_save=["classifier"])
            model = peft.get_peft_model(model, config)
        trainer = FederatedTrainer(
            max_rounds=given.rounds,
            local_steps=10,
            callbacks=methods,  # type: ignore[arg-type]
            default_root_dir=given.out,
            enable_progress_bar=False,
        )
        trainer.fit(HFModule(model, lr=5e-4 if given.model else 2e-2), data)
        scores = [
            row.value
            for row in trainer.rows
            if row.metric == "test_accuracy" and row.stage == "L2" and row.data == "local"
        ]
        scores = scores[-len(clients) :]
        sent = (trainer.summary["bytes_up"] + trainer.summary["bytes_down"]) / 1e6 / given.rounds
        print(f"{name:10} accuracy {sum(scores) / max(1, len(scores)):.3f}, {sent:.2f} MB a round")


if __name__ == "__main__":
    main()
