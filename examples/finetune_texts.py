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
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedlightning import FederatedTrainer  # before lightning

# isort: split
import peft
import torch
from transformers import BertConfig, BertForSequenceClassification

from fedlightning.callbacks import Central, FedIT, FedPer, FedSALoRA, Local
from fedlightning.datamodules import ByteTokenizer, DirichletPartitioner, TextFolderDataModule
from fedlightning.models import HFModule, load_pretrained
from fedlightning.report.build import build_report
from fedlightning.study.finished_runs import load_study, runs_below
from fedlightning.study.study import Study

CLIENTS = 8
MADE_UP = {
    "ham": ["see you at noon", "the notes are in the folder", "lunch on friday"],
    "spam": ["win money now", "free!!"],
}
HEAD = "model.base_model.model.classifier"
METHODS: dict[str, list[Any]] = {
    "adapters": [FedIT(r=None)],  # those that peft has put in, and the head
    "adapters, own head": [FedIT(r=None), FedPer(personal=[HEAD])],
    "FedSA-LoRA": [FedSALoRA(r=None)],
    "Local": [Local()],
    "Central": [Central()],
}


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


def write_texts(folder: Path, kind: str, texts: list[str]) -> None:
    """Write the texts of a class."""
    (folder / kind).mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / kind / f"{number:04}.txt").write_text(text)


def make_up(folder: Path) -> None:
    """Write texts that nobody has written."""
    draw = random.Random(0)
    for kind, sentences in MADE_UP.items():
        write_texts(folder, kind, [f"{draw.choice(sentences)} {draw.randrange(10)}" for _ in range(120)])


def build(folder: str | None, classes: int) -> Any:
    """Return the pretrained model of a folder with a new head, or a tiny random one, with adapters."""
    adapters = {"task_type": "SEQ_CLS", "r": 8, "lora_alpha": 16, "target_modules": ["query", "value"]}
    if folder:
        return load_pretrained(folder, num_labels=classes, adapters=adapters)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=258, pad_token_id=257, num_labels=classes, **sizes))
    return peft.get_peft_model(model, peft.LoraConfig(**adapters))


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

    root = given.texts or tempfile.mkdtemp()
    for package in given.packages or ():
        texts = list(dict.fromkeys(documentation(package)))
        random.Random(0).shuffle(texts)
        write_texts(Path(root), package, texts[: given.most])
    if not given.texts and not given.packages:
        make_up(Path(root))
    partitioner = DirichletPartitioner(num_clients=CLIENTS, alpha=0.3)
    data = TextFolderDataModule(root, partitioner, given.model or ByteTokenizer(), max_length=given.max_length)
    print(f"{sum(map(data.num_samples, data.client_ids))} training texts of {len(data.class_names)} classes")
    for name in given.methods:
        for seed in given.seeds:
            torch.manual_seed(seed)
            model = build(given.model, len(data.class_names))
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
