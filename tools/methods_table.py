"""Run every algorithm of the catalogue at its defaults on three data sets, and write `docs/results/methods.md` from the runs.

    python -m tools.methods_table --heart FOLDER --mnist FOLDER [--out runs/methods] [--only FedAvg,Local] [--data digits]

Runs that are in `--out` already are not repeated; `--again FedAMP,pFedLA` runs those anew. `--write-only` writes the page
from what is there: a method without a run in `--out` keeps the line that the page has. The reasons beside results below
Local are in `tools/methods_notes.yaml`.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from fedlightning import FederatedTrainer  # first: it repairs torchvision beside a CPU build of torch

# isort: split
from lightning.pytorch import LightningModule, seed_everything

from fedlightning.catalogue import ALGORITHMS, FAMILIES, create, find
from fedlightning.datamodules import (
    DigitsDataModule,
    DirichletPartitioner,
    FederatedDataModule,
    HeartDiseaseDataModule,
    MNISTDataModule,
)
from fedlightning.errors import ConfigurationError
from fedlightning.models import MLP, Classifier, DigitsCNN, TinyNet
from fedlightning.options import Evaluation
from fedlightning.virtual_time import Asynchronous, LogNormalSpeed, VirtualClock, WaitFree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/results/methods.md"
NOTES = ROOT / "tools" / "methods_notes.yaml"
DATA = "digits,heart,mnist"
SEEDS = (0, 1, 2)
STEP_ROUNDS = 100
"""Rounds of the methods that take one step in a round."""
PUBLIC = 0.1
"""Share of the training samples that is public for methods that need public data."""
ARRIVALS = {"FedAsync": 1, "FedBuff": 10}
"""Updates that make a round of the asynchronous methods: they get as many rounds as give the visits of the others."""
ON_PUBLIC_DATA = ("Dapper", "DSFL", "FCCL", "FCCLPlus", "FedBE", "FedDF", "FedET", "FedKEMF", "FedMD", "pFedHR")
"""Methods that need public data."""

HEAD = """# Every method at its defaults

Made by `python -m tools.methods_table --heart FOLDER --mnist FOLDER` from real runs: all algorithms of the catalogue,
each as `FederatedTrainer(callbacks=[Method()])` builds it, on the same data, network, optimizer and local work. What
a method needs beside that is set: `head` for FENDA and PerFCL, one step a round for FedSGD (full batches), L2GD, DSGD,
LDSGD and SWIFT (100 rounds), gradient clipping for HeteroFL, BatchNorm for FedBN, a tenth of the training samples as
public data for those that need some, a client whose labels are the server's for pFedKnow. FedAsync and FedBuff run on a
virtual clock with all clients at work (log-normal speeds, sigma 0.5) until as many updates have arrived as the others'
ten rounds have. Methods for models of different sizes have one model here; what they are for is in
[the page on different models](../explanation/different_models.md).

Accuracy is the mean over clients, on each client's own test data, of the model that it would deploy after the last
round (stage L1, no checkpoint selection), and its standard deviation over seeds, which also move the split. The worst
client, the megabytes sent up and down and the seconds (of busy cores: only orders of magnitude) are means over seeds.
Lines of one seed (seed 0, with which Local has 0.799 on heart) have no spread, and differences of some hundredths from
them say nothing. The runs are short, so that the table can be made again; they show whether defaults work, not which
method is best. A method below Local has the reason beside it.

Where such runs chose a default, the table is not an independent test of it: what the papers of pFedBayes and GPFL leave open
(seed 0, on test scores), FedRolex's `scaler`, QFedAvg's `q` and AFL's `gamma` (digits, seeds 0 to 2), and FedGH's steps of
the server, FedKD's `strength`, MAPPER's `warmup` and FedBABU's `epochs` (validation data of digits, with this network, and
of FashionMNIST, seeds 0 to 2).
"""


@dataclass(frozen=True)
class Setting:
    """One data set with its network and the work that every method gets.

    Attributes:
        name: Its name on the command line and in the results.
        text: What the page says of it.
        head: Path of the network's last layer.
        clients: Number of clients.
        data: Makes the data module from a seed and a batch size (`None`: the usual one).
        module: Makes the module of a method.
        trainer: Arguments of the trainer.
        options: Arguments of methods that the network asks for.
        not_run: Methods that cannot run here, with the reason.
    """

    name: str
    text: str
    head: str
    clients: int
    data: Callable[[int, int | None], FederatedDataModule]
    module: Callable[[str], LightningModule]
    trainer: dict[str, Any] = field(default_factory=lambda: {"max_rounds": 10, "local_epochs": 2})
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)


def settings(heart: str, mnist: str) -> dict[str, Setting]:
    """Return the three settings.

    Args:
        heart: Folder of the four files of Fed-Heart-Disease.
        mnist: Folder of the files of MNIST.
    """

    def split() -> DirichletPartitioner:
        return DirichletPartitioner(num_clients=10, alpha=0.5)

    def digits_net(method: str) -> LightningModule:
        return Classifier(DigitsCNN(norm="batch" if method == "FedBN" else "none"), num_classes=10, lr=0.1)

    several = dict.fromkeys(("FedMultimodal", "Harmony"), "it is for data of several modalities")
    no_norm = {"FedBN": "its network has no BatchNorm layer", **several}
    one_logit = dict.fromkeys(
        ("FD", "FedLC", "FedRoD", "FjORD", "pFedKnow"),
        "it needs a logit for each class, and the network has one for two",
    )
    two_classes = dict.fromkeys(
        ("FCCLPlus", "FedNTD"), "it distils the classes that are not a sample's, and of two that is one"
    )
    labelled = {"pFedKnow": {"server": "0"}}
    every = [
        Setting(
            "digits",
            "scikit-learn's digits (1797 images), ten clients by Dirichlet(0.5) label skew, `DigitsCNN`, SGD 0.1, batch 16, "
            "10 rounds of 2 epochs",
            "net.fc",
            10,
            lambda seed, size: DigitsDataModule(split(), batch_size=size or 16, seed=seed),
            digits_net,
            options=labelled,
            not_run=several,
        ),
        Setting(
            "heart",
            "Fed-Heart-Disease (740 patients), four hospitals, `TinyNet`, SGD 0.1, batch 16, 10 rounds of 4 epochs",
            "net.fc2",
            4,
            lambda seed, size: HeartDiseaseDataModule(heart, batch_size=size or 16, seed=seed),
            lambda _: Classifier(TinyNet(), num_classes=2, lr=0.1),
            trainer={"max_rounds": 10, "local_epochs": 4},
            options={"LGFedAvg": {"num_layers": 1}},
            not_run=no_norm | one_logit | two_classes,
        ),
        Setting(
            "mnist",
            "MNIST (1500 training, 1000 test images), ten clients by Dirichlet(0.5) label skew, `MLP(784, [64, 32], 10)`, "
            "SGD 0.1, batch 16, 10 rounds of 2 epochs",
            "net.fc3",
            10,
            lambda seed, size: MNISTDataModule(
                mnist, split(), batch_size=size or 16, seed=seed, max_train=1500, max_test=1000
            ),
            lambda _: Classifier(MLP(784, [64, 32], 10), num_classes=10, lr=0.1),
            options=labelled,
            not_run=no_norm,
        ),
    ]
    return {setting.name: setting for setting in every}


def run(setting: Setting, method: str, seed: int, engine: str = "sequential", **changes: Any) -> dict[str, Any]:
    """Train and test one method; return its accuracy, worst client, megabytes and seconds, or the error."""
    options = setting.options.get(method, {}) | changes
    if method in ("FENDA", "PerFCL"):  # required: where the extractor ends
        options["head"] = setting.head
    budget, batch = setting.trainer, None
    if method in ("FedSGD", "L2GD", "DSGD", "LDSGD", "SWIFT"):  # one step a round, by definition; LDSGD counts steps
        budget = {"max_rounds": STEP_ROUNDS, "local_steps": 1}
        batch = 100_000 if method == "FedSGD" else None
    if method == "SWIFT":
        budget = {**budget, "loop": WaitFree()}
    if method in ARRIVALS:
        clock = VirtualClock(LogNormalSpeed(0.01, sigma=0.5))
        visits = budget["max_rounds"] * setting.clients
        budget = {**budget, "max_rounds": visits // ARRIVALS[method], "loop": Asynchronous(clock)}
    clip = {"gradient_clip_val": 1.0} if method == "HeteroFL" else {}  # as in its paper
    seed_everything(seed, verbose=False)
    with TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            **budget,
            **clip,
            seed=seed,
            callbacks=[create(method, **options)],
            evaluation=Evaluation(stages=["L1"], test_data=["local"], every=0),
            save_state=0,
            logger=False,
            enable_progress_bar=False,
            accelerator="cpu",
            default_root_dir=folder,
            engine=engine,
        )
        started = time.process_time()
        data: Any = setting.data(seed, batch)
        data.public_fraction = PUBLIC if method in ON_PUBLIC_DATA else 0.0
        trainer.fit(setting.module(method), data)
        trainer.test()
    rows = [row for row in trainer.results if row["split"] == "test" and row["metric"] == "test_accuracy"]
    row = next((row for row in rows if row["stage"] == "L1"), rows[0])
    return {
        "accuracy": row["mean"],
        "worst": row["worst"],
        "megabytes": (trainer.summary["bytes_up"] + trainer.summary["bytes_down"]) / 1e6,
        "seconds": time.process_time() - started,
    }


def fastest(setting: Setting, method: str, seed: int, **changes: Any) -> dict[str, Any]:
    """Run a method as one stack of clients, or one client after another where it cannot be stacked."""
    try:
        return run(setting, method, seed, "vectorized", **changes)
    except ConfigurationError:
        return run(setting, method, seed, **changes)


def done(path: Path) -> bool:
    """Return True if a result is there that is not an error."""
    return path.exists() and "error" not in json.loads(path.read_text())


def collect(
    chosen: Iterable[Setting], methods: Iterable[str], out: Path, again: Iterable[str], seeds: Iterable[int] = SEEDS
) -> None:
    """Run what is missing; every result is a file of its own, so that several processes can share the work."""
    for seed in seeds:
        for setting in chosen:
            for method in methods:
                path = out / setting.name / f"{method}-{seed}.json"
                if method in setting.not_run or (done(path) and method not in again):
                    continue
                try:
                    result = fastest(setting, method, seed)
                except Exception as error:  # a method that does not run is a line of the table, not its end
                    result = {"error": f"{type(error).__name__}: {error}"}
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(result))
                print(
                    seed,
                    setting.name,
                    method,
                    {k: round(v, 3) if k != "error" else v for k, v in result.items()},
                    flush=True,
                )


def read(out: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the finished runs: data set -> method -> one result for each seed."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for path in sorted(out.glob("*/*.json")):
        result = json.loads(path.read_text())
        if "error" not in result:
            found.setdefault(path.parent.name, {}).setdefault(path.stem.rpartition("-")[0], []).append(result)
    return found


HEADER = [
    "| method | kind | accuracy | worst client | MB sent | s | seeds | notes |",
    "|---|---|---|---|---|---|---|---|",
]


def lines_of(results: dict[str, list[dict[str, Any]]]) -> dict[str, list[str]]:
    """Return the cells of each method's line, from its accuracy to the number of seeds."""
    lines = {}
    for method, runs in results.items():
        accuracy = [run["accuracy"] for run in runs]
        spread = f" ± {stdev(accuracy):.3f}" if len(runs) > 1 else ""
        worst, sent, seconds = (mean(run[key] for run in runs) for key in ("worst", "megabytes", "seconds"))
        lines[method] = [
            f"{mean(accuracy):.3f}{spread}",
            f"{worst:.3f}",
            f"{sent:.2f}",
            f"{seconds:.1f}",
            str(len(runs)),
        ]
    return lines


def lines_on(page: str) -> dict[str, dict[str, list[str]]]:
    """Return the lines that a page has: data set -> method -> the cells that :func:`lines_of` makes."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in page.split("\n## ")[1:]:
        name, _, rest = part.partition("\n")
        table = [line.split(" | ") for line in rest.splitlines() if line.startswith("| ") and line not in HEADER]
        found[name] = {cells[0].removeprefix("| "): cells[2:7] for cells in table}
    return found


def page(
    every: dict[str, Setting],
    found: dict[str, dict[str, list[dict[str, Any]]]],
    notes: dict[str, dict[str, str]],
    text: str = HEAD,
    before: str = "",
) -> str:
    """Return the page: a table for each data set, best method first, each family's name beside the method.

    Args:
        every: The settings.
        found: What :func:`read` returns.
        notes: Method -> data set, or `all` -> the reason of a result below Local.
        text: What stands above the tables.
        before: The page as it was: a method that was not run keeps its line.
    """
    parts, kept = [text], lines_on(before)
    families = {row.name: FAMILIES[row.family].lower() for row in ALGORITHMS}
    for name, setting in every.items():
        lines = {method: cells for method, cells in kept.get(name, {}).items() if method in families}
        scores = {method: float(cells[0].partition(" ")[0]) for method, cells in lines.items()}
        scores |= {method: mean(run["accuracy"] for run in runs) for method, runs in found.get(name, {}).items()}
        lines |= lines_of(found.get(name, {}))
        order = sorted(scores, key=lambda method: -scores[method])
        above = set(order[: order.index("Local") + 1] if "Local" in order else order)
        parts.append(f"## {name}\n\n{setting.text}.\n")
        table = list(HEADER)
        for method in order:
            own = notes.get(method, {})
            reason = "" if method in above else own.get(name, own.get("all", "**below Local, not explained**"))
            table.append(f"| {' | '.join([method, families.get(method, ''), *lines[method], reason])} |")
        parts.append("\n".join(table) + "\n")
        missing = [row.name for row in ALGORITHMS if row.name not in lines and row.name not in setting.not_run]
        absent = [f"{method} ({reason})" for method, reason in setting.not_run.items()]
        absent += [f"{method} (no run yet)" for method in missing]
        if absent:
            parts.append(f"Not in the table: {', '.join(absent)}.\n")
    return "\n".join(parts)


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heart", default="data/heart_disease", help="folder of processed.*.data")
    parser.add_argument("--mnist", default="data", help="folder of MNIST's files")
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    parser.add_argument("--only", default="", help="methods, by commas; default: all")
    parser.add_argument("--again", default="", help="methods to run anew, by commas")
    parser.add_argument("--data", default=DATA, help="data sets, by commas")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="seeds, by commas")
    parser.add_argument("--write-only", action="store_true", help="run nothing: write the page from what is there")
    options = parser.parse_args()
    for name in ("lightning.pytorch", "fedlightning", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    every = settings(options.heart, options.mnist)
    again = [find(name).name for name in options.again.split(",") if name]
    only = [find(name).name for name in options.only.split(",") if name]
    methods = only or [row.name for row in ALGORITHMS]
    if not options.write_only:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        collect([every[name] for name in options.data.split(",")], methods, options.out, again, seeds)
    if options.write_only or not (options.only or options.data != DATA):
        notes = yaml.safe_load(NOTES.read_text())
        PAGE.write_text(page(every, read(options.out), notes, before=PAGE.read_text()))


if __name__ == "__main__":
    main()
