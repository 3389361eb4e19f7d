"""Fine-tune a pretrained encoder on texts of eight clients: adapters for all and of one's own, clients alone, pooled data.

    python examples/finetune_texts.py                                    # a tiny random encoder on made-up mails: seconds
    python examples/finetune_texts.py --model MiniLM --texts mails       # a folder of transformers; one of texts by class
    python examples/finetune_texts.py --model MiniLM --packages numpy scipy sklearn torch --seeds 0 1 2

`--texts` has a folder for each class with a file for each text; `--packages` takes the documentation of Python packages that
are installed, with the package as class. Classes are divided by Dirichlet(0.3). Needs `peft` and `transformers`.
"""

import argparse
import importlib
import inspect
import pkgutil
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedlightning import FederatedTrainer  # before lightning

# isort: split
import peft
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from fedlightning.callbacks import Central, FedIT, FedPer, FedSALoRA, Local
from fedlightning.datamodules import ByteTokenizer, DirichletPartitioner, TextDataModule
from fedlightning.models import HFModule
from fedlightning.report.build import build_report
from fedlightning.seeding import generator
from fedlightning.study.finished_runs import load_study, runs_below
from fedlightning.study.study import Study

CLIENTS = 8
MADE_UP = {
    "ham": ["see you at noon", "the notes are in the folder", "lunch on friday"],
    "spam": ["win money now", "free!!"],
}
HEAD, TARGETS = "model.classifier", ["query", "value"]
SIZES = {"r": 8, "alpha": 16, "target_modules": TARGETS, "head": HEAD}
METHODS: dict[str, list[Any]] = {
    "adapters": [FedIT(**SIZES)],
    "adapters, own head": [FedIT(**SIZES), FedPer(personal=[HEAD])],
    "FedSA-LoRA": [FedSALoRA(**SIZES)],
    "Local": [Local()],
    "Central": [Central()],
}


def read_texts(folder: str) -> list[dict[str, Any]]:
    """Return rows with a text and the number of its class."""
    classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    files = [(file, label) for label, path in enumerate(classes) for file in sorted(path.glob("*.*"))]
    return [{"text": file.read_text(errors="replace"), "label": label} for file, label in files]


def documentation(package: str) -> Iterator[str]:
    """Yield the documentation of a package's public functions and classes, without the package's name."""
    root = importlib.import_module(package)
    names = [f"{package}.{found.name}" for found in pkgutil.iter_modules(root.__path__) if found.name[0] != "_"]
    modules = [root, *(module for module in (vars(root).get(name.split(".")[1]) for name in names) if module)]
    for module in filter(inspect.ismodule, modules):
        for name, value in sorted(vars(module).items()):
            text = inspect.getdoc(value) if callable(value) and name[0] != "_" else None
            if text and len(text) > 80 and str(getattr(value, "__module__", "")).startswith(package):
                yield re.sub(package, "it", text, flags=re.IGNORECASE)[:1000]


def read_packages(packages: list[str], limit: int) -> list[dict[str, Any]]:
    """Return rows with at most `limit` texts of each package and its number."""
    rows = []
    for label, package in enumerate(packages):
        texts = list(dict.fromkeys(documentation(package)))
        random.Random(0).shuffle(texts)
        rows += [{"text": text, "label": label} for text in texts[:limit]]
    return rows


def make_up() -> list[dict[str, Any]]:
    """Return rows that nobody has written."""
    draw = random.Random(0)
    made = [(draw.choice(MADE_UP[kind]), label) for label, kind in enumerate(MADE_UP) for _ in range(120)]
    return [{"text": f"{text} {draw.randrange(10)}", "label": label} for text, label in made]


def divide(rows: list[dict[str, Any]]) -> dict[str, tuple[Any, Any, Any]]:
    """Return each client's rows for training, validation (a fifth) and testing (a fifth)."""
    labels = torch.tensor([row["label"] for row in rows])
    plan = DirichletPartitioner(num_clients=CLIENTS, alpha=0.3).plan(labels, generator(0, "clients"))
    clients = {}
    for client, indices in zip(plan.client_ids, plan.split(labels, generator(0, "clients")), strict=True):
        order = torch.tensor(indices)[torch.randperm(len(indices), generator=generator(0, client))]
        own = [rows[index] for index in order]
        fifth = max(1, len(own) // 5)
        clients[client] = own[2 * fifth :], own[:fifth], own[fifth : 2 * fifth]
    return clients


def build(folder: str | None, classes: int) -> Any:
    """Return the pretrained model of a folder with a new head, or a tiny random one."""
    if folder:
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=classes)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=258, pad_token_id=257, num_labels=classes, **sizes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--texts")
    parser.add_argument("--packages", nargs="+")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--most", type=int, default=400, help="texts of a package")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="of a client in a round")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--lr", type=float)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--out", default="runs/finetune_texts")
    given = parser.parse_args()

    rows = (
        read_texts(given.texts)
        if given.texts
        else read_packages(given.packages, given.most)
        if given.packages
        else make_up()
    )
    classes = 1 + max(row["label"] for row in rows)
    tokenizer = AutoTokenizer.from_pretrained(given.model) if given.model else ByteTokenizer()
    data = TextDataModule(divide(rows), tokenizer, batch_size=16, max_length=given.max_length)
    print(f"{len(rows)} texts of {classes} classes")
    for name in given.methods:
        for seed in given.seeds:
            torch.manual_seed(seed)
            model = build(given.model, classes)
            if name in ("Local", "Central"):  # nothing travels, so that no method has to know which part would
                config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, modules_to_save=["classifier"])
                model = peft.get_peft_model(model, config)
            trainer = FederatedTrainer(
                name=name,
                seed=seed,
                max_rounds=given.rounds,
                local_steps=given.steps * (CLIENTS if name == "Central" else 1),  # as many steps in all
                callbacks=METHODS[name],
                default_root_dir=given.out,
                enable_progress_bar=False,
            )
            trainer.fit(HFModule(model, lr=given.lr or (1e-3 if given.model else 2e-2)), data)
            trainer.test()
    paths = runs_below(Path(given.out))
    for row in Study(load_study(paths), metric="accuracy").overview():
        interval = f" ± {row['ci95_radius']:.3f}" if row["ci95_radius"] is not None else ""
        sent, minutes = row["mb_total"] / given.rounds, row["seconds"] / 60
        print(f"{row['method']:18} accuracy {row['mean']:.3f}{interval}, {sent:.2f} MB a round, {minutes:.1f} minutes")
    print(build_report(Path(given.out, "report"), paths))


if __name__ == "__main__":
    main()
