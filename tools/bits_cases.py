"""The cases of tools/bits.py: small federations of every method, data, initial weights, command lines and refusals.

Methods with toy arguments are the `CASES` of the tests of callbacks; toy module and data are `fedlightning.testing`'s.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedlightning.callbacks as fl
import fedlightning.datamodules as fd
import fedlightning.models as fm
from fedlightning import FederatedTrainer
from fedlightning.options import Evaluation, FailurePolicy, Processes, Vectorized
from fedlightning.seeding import generator
from fedlightning.server.loop import Synchronous
from fedlightning.testing.toys import ToyData, ToyModule
from fedlightning.virtual_time import (
    Asynchronous,
    DayNightAvailability,
    DrawnStaleness,
    FixedLink,
    LogNormalLink,
    LogNormalSpeed,
    SampleSpeed,
    VirtualClock,
    WaitFree,
)
from fedlightning.wrappers import dual_by_head, mix_logits
from tests.conformance.case import Case, collect
from tests.helpers import NormNet, Toy, toy_data
from tools.bits_runs import Deep, Moments, Run, fit, in_a_fork, in_place, onboarded, parts_of, plain, resumed, seeded

Cases = Iterator[tuple[str, Run]]
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


# -- methods ---------------------------------------------------------------------------------------------------------


def clock(availability: Any = None) -> VirtualClock:
    """Return a clock with drawn speeds and links."""
    options = {} if availability is None else {"availability": availability}
    return VirtualClock(LogNormalSpeed(0.01, visit_sigma=0.3), LogNormalLink(down=2e4, up=1e4), **options)


LOOPS: dict[str, dict[str, Any]] = {
    "asynchronous": {"loop_of": lambda: Asynchronous(clock(), concurrency=3, arrivals=None), "max_rounds": 6},
    "staleness": {"loop_of": lambda: DrawnStaleness(2), "max_rounds": 6},
    "waitfree": {"loop_of": lambda: WaitFree(clock(), steps=2), "max_rounds": 4},
    "deadline": {"loop_of": lambda: Synchronous(clock(), deadline=0.2, late="partial"), "max_rounds": 3},
}
OF_TWO = {"small": ToyModule, "deep": Deep}
SOME = [
    "FedAvg",
    "FedProx",
    "SCAFFOLD",
    "Ditto",
    "APFL",
    "FedPer",
    "FLIU",
    "FedALA",
    "FedAMP",
    "IFCA",
    "MOON",
    "PLayerFL",
]
"""Methods that also run with a deadline and in mixed precision."""
OWN: dict[str, dict[str, Any]] = {"CFL": {"participation": 1.0}} | {
    name: {"local_loop": "auto"} for name in ("Central", "Local", "SWIFT", "FML", "FML together")
}
"""What else methods need to run."""
IN_PROCESSES = ["FedAvg", "SCAFFOLD", "APFL", "FedALA", "IFCA", "FedGH"]
KILLED = ["FedAdam", "APFL", "SCAFFOLD", "PLayerFL", "FedAMP", "IFCA", "FedBuff", "FedFomo"]


@functools.cache
def methods() -> dict[str, Case]:
    """Return every method with toy arguments; variants have a word after the name."""
    found: dict[str, Case] = collect("CASES")
    return found


def of_methods() -> Cases:
    """Yield every method with both loops of a visit, engines, loops of rounds, resume, newcomers, and two architectures."""
    first = {type(case.algorithm): name for name, case in reversed(methods().items())}
    for name, case in methods().items():
        own, given = [case.algorithm], case.arguments | OWN.get(name, {})
        yield f"fast/{name}", plain(own, **{"local_loop": "fast", "evaluation": 2} | given)
        if first[type(case.algorithm)] != name:
            continue
        lightning = {"full": True, "local_loop": "trainer", "max_rounds": 2}
        yield f"lightning/{name}", plain(own, **lightning | given)
        yield f"vectorized/{name}", plain(own, **{"engine": "vectorized", "max_rounds": 2} | given)
        some = {"participation": 3, "evaluation": 2}
        yield f"resume/{name}", resumed(own, in_place, **some | given)
        yield f"newcomer/{name}", onboarded(own, **{"max_rounds": 2, "evaluation": 2} | given)
        two = functools.partial(_client_models, cycle=("small", "deep"))
        yield f"architectures/{name}", plain(own, **{"module": two, "max_rounds": 2} | given)
        momentum = functools.partial(seeded, Moments, full=bool(given.get("full")))
        kept = {"module": momentum, "optimizer_state": "keep"} | ({} if "local_steps" in given else {"local_epochs": 1})
        yield f"keep/{name}", plain(own, **kept | given)
        for loop, options in LOOPS.items():
            if loop != "deadline" or name in SOME:
                yield f"{loop}/{name}", plain(own, **{k: v for k, v in given.items() if k != "loop"} | options)
        if name in SOME:
            mixed = {"precision": "bf16-mixed", "gradient_clip_val": 1.0, "accumulate_grad_batches": 2, "full": True}
            yield f"bf16/{name}", plain(own, **mixed | {"max_rounds": 2} | given)
        if name in IN_PROCESSES:
            yield f"processes/{name}", plain(own, **{"engine": Processes(2), "max_rounds": 2} | given)
        if name in KILLED:
            yield f"killed/{name}", resumed(own, in_a_fork, **some | given)


def _client_models(cycle: Sequence[str]) -> fm.ClientModels:
    return fm.ClientModels({name: seeded(OF_TWO[name]) for name in cycle})


# -- compositions ----------------------------------------------------------------------------------------------------

TOGETHER: dict[str, list[Any]] = {
    "FENDA FedProx FedAdam": [fl.FENDA("net.3"), fl.FedProx(), fl.FedAdam()],
    "FedPer FedProx FedAdam": [fl.FedPer(), fl.FedProx(), fl.FedAdam()],
    "FedBN FedProx FedAdam": [fl.FedBN(), fl.FedProx(), fl.FedAdam()],
    "FedPer FedBN": [fl.FedAdam(), fl.FedBN(), fl.FedProx(), fl.FedPer()],
    "FLIU FedBN": [fl.FLIU(gamma=0.5), fl.FedBN()],
    "APFL FedProx FedAdam": [fl.APFL(), fl.FedProx(), fl.FedAdam()],
    "APFL FedBN": [fl.APFL(), fl.FedBN()],
    "APFL SCAFFOLD": [fl.APFL(weighting="uniform"), fl.SCAFFOLD()],
    "PLayerFL SCAFFOLD": [fl.PLayerFL(split=1), fl.SCAFFOLD()],
    "PLayerFL FedAdam": [fl.PLayerFL(split=1), fl.FedProx(), fl.FedAdam()],
    "PLayerFL FLIU": [fl.PLayerFL(split=1), fl.FLIU(gamma=0.5)],
    "SCAFFOLD FedAdam": [fl.SCAFFOLD(), fl.FedAdam(), fl.FedProx()],
    "SCAFFOLD FedPer": [fl.SCAFFOLD(option=1), fl.FedPer()],
    "Ditto FedAdam": [fl.Ditto(), fl.FedAdam()],
    "Ditto FedBN": [fl.Ditto(), fl.FedBN()],
    "MOON FedAvgM": [fl.MOON(head="net.3"), fl.FedAvgM()],
    "FedNova FedProx": [fl.FedNova(), fl.FedProx()],
    "IFCA FedProx": [fl.IFCA(num_clusters=2), fl.FedProx()],
    "IFCA FedPer": [fl.IFCA(num_clusters=2), fl.FedPer()],
    "FedAMP FedBN": [fl.FedAMP(), fl.FedBN()],
    "FedProx Stragglers": [fl.FedProx(), fl.Stragglers(0.5)],
    "FedAvg Stragglers": [fl.FedAvg(), fl.Stragglers(0.5, keep=False)],
    "FedAvg Poisson": [fl.FedAvg(), fl.PoissonSampling(0.6)],
    "FedPer PrivateLR": [fl.FedPer(), fl.PrivateLR(0.5)],
    "LocalAdaptation FedProx": [fl.LocalAdaptation(), fl.FedProx()],
    "FedLAMA FedProx": [fl.FedLAMA(), fl.FedProx()],
    "FedLP FedAdam": [fl.FedLP(), fl.FedAdam()],
    "FedAvg diagnostics": [fl.FedAvg(), fl.GradientVariance(), fl.HessianTrace()],
    "FedRep FedProx": [fl.FedRep(), fl.FedProx()],
    "FedALA FedProx": [fl.FedALA(), fl.FedProx()],
    # refused
    "FedAdam SCAFFOLD": [fl.FedAdam(), fl.SCAFFOLD(server_lr=0.5)],
    "FedAdam twice": [fl.FedAdam(), fl.FedAdam()],
    "PLayerFL PLayerFLRandom": [fl.PLayerFL(), fl.PLayerFLRandom()],
    "PLayerFL Central": [fl.PLayerFL(), fl.Central()],
    "Central FedPer": [fl.Central(), fl.FedPer()],
    "APFL Central": [fl.APFL(), fl.Central()],
    "FLIU FedAvg": [fl.FLIU(), fl.FedAvg()],
    "FLIU FedALA": [fl.FLIU(), fl.FedALA()],
    "SCAFFOLD FENDA": [fl.SCAFFOLD(), fl.FENDA("net.3", weighting="samples")],
    "Local GlobalCheckpoint": [fl.Local(), fl.GlobalCheckpoint()],
    "FedPer GlobalCheckpoint": [fl.FedPer(), fl.GlobalCheckpoint()],
    "DFedAvg FedAdam": [fl.DFedAvg(), fl.FedAdam()],
    "FedBuff synchronous": [fl.FedBuff(2)],
    "FedPer unknown": [fl.FedPer(personal=["net.9"])],
    "FedPer everything": [fl.FedPer(num_layers=9)],
}


def of_compositions() -> Cases:
    """Yield methods that are combined, with test scores, the cross-client matrix and the best models of clients."""
    for name, callbacks in TOGETHER.items():

        def run(folder: Path, parts: dict[str, Any], callbacks: list[Any] = callbacks) -> None:
            given = {"evaluation": Evaluation(data=["local", "pooled"], test_data=["local", "pooled", "clients"])}
            data = toy_data({"0": 24, "1": 40, "2": 16})
            module = functools.partial(seeded, NormNet, "momentum", dropout=0.1)
            checkpoint = (
                [] if any(isinstance(item, fl.GlobalCheckpoint) for item in callbacks) else [fl.LocalCheckpoint()]
            )
            trainer = fit([*callbacks, *checkpoint], folder, module=module, data=data, batch_size=8, **given)
            trainer.test(verbose=False)
            parts |= parts_of(trainer)

        yield f"together/{name}", run


OPTIONS: dict[str, dict[str, Any]] = {
    "share": {"participation": 0.5, "lr_decay": 0.9},
    "epochs": {"local_epochs": 2},
    "local buffers": {"full": True, "float_buffers": "local"},
    "server buffers": {"full": True, "float_buffers": "server"},
    "stages": {"evaluation": Evaluation(stages=["L2"], every=2)},
    "few scored": {"evaluation": Evaluation(clients=2)},
    "auto": {"engine": "auto"},
    "stack of two": {"engine": Vectorized(clients_per_stack=2)},
    "moments in stacks": {"engine": "vectorized", "module": functools.partial(seeded, Moments)},
    "accumulate": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "clip by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "bf16": {"precision": "bf16-true"},
    "little memory": {"client_memory_gb": 1e-9, "full": True, "local_loop": "trainer"},
    "limited": {"limit_train_batches": 1, "limit_val_batches": 1, "local_epochs": 1},
    "another seed": {"seed": 7},
    "keep": {"optimizer_state": "keep"},
    "NaN": {"data_of": lambda: ToyData(nan="site1")},
    "NaN retried": {"data_of": lambda: ToyData(nan="site1"), "failures": "retry"},
    "NaN stops": {"data_of": lambda: ToyData(nan="site1"), "failures": "stop"},
    "too few": {"data_of": lambda: ToyData(nan="site1"), "failures": FailurePolicy(min_clients=4)},
    "empty client": {"data_of": lambda: ToyData(sizes=(12, 1, 0, 9))},
    "fixed link": {"loop_of": lambda: Synchronous(VirtualClock(SampleSpeed(0.1), FixedLink(1e3, 1e3, 0.1)))},
    "first come": {"loop_of": lambda: Synchronous(clock(), first=2)},
    "late are dropped": {"loop_of": lambda: Synchronous(clock(), deadline=0.2)},
    "day and night": {"loop_of": lambda: Asynchronous(clock(DayNightAvailability(1.0, period=2.0)), concurrency=2)},
    "drop at end": {"loop_of": lambda: Asynchronous(clock(), concurrency=0.5, arrivals=2, max_staleness=1)},
    "virtual seconds": {
        "loop_of": lambda: Synchronous(clock()),
        "evaluation": Evaluation(seconds=0.3),
        "max_rounds": 6,
    },
}
REFUSED: list[dict[str, Any]] = [
    {"local_epochs": 2, "local_steps": 5}, {"max_epochs": 3}, {"max_rounds": 0}, {"local_steps": 0}, {"evaluate_every": -1},
    {"participation": 1.5}, {"participation": 0}, {"lr_decay": 0}, {"optimizer_state": "new"}, {"float_buffers": "mean"},
    {"engine": "warp"}, {"stages": ["G", "L3"]}, {"evaluate_data": ["global"]},
    {"callbacks": ["fedprox"]},
    {"max_time": "1h"}, {"seed": None}, {"name": None}, {"logger": "csv"}, {"num_nodes": 2}, {"limit_val_batches": -1},
    {"held_out": 1.0}, {"held_out": ["nobody"]}, {"min_clients": 0}, {"update_limit": -1}, {"client_retries": 0},
    {"local_loop": "slow"}, {"workers": 2}, {"clients_per_stack": 2}, {"loop": "asynchronous"}, {"evaluate_seconds": 1.0},
    {"participation": 9}, {"log_clients": ["nobody"]}, {"local_loop": "fast", "val_check_interval": 1},
]  # fmt: skip


def of_options() -> Cases:
    """Yield options of the trainer with FedAvg and with a method that keeps state, and refused arguments."""
    for name, options in OPTIONS.items():
        yield f"options/{name}", plain([fl.FedAvg()], **options)
        yield f"options/{name} SCAFFOLD", plain([fl.SCAFFOLD(), fl.FedPer(weighting="uniform")], **options)
    for given in REFUSED:

        def run(folder: Path, parts: dict[str, Any], given: dict[str, Any] = given) -> None:
            quiet = {"logger": False, "enable_progress_bar": False, "default_root_dir": folder, "max_rounds": 1}
            trainer = FederatedTrainer(**quiet | given)
            trainer.fit(seeded(ToyModule), ToyData())
            parts |= parts_of(trainer)

        yield f"arguments/{' '.join(f'{name}={value!r}' for name, value in given.items())}", run


# -- data, models and command lines ----------------------------------------------------------------------------------

PARTITIONERS: dict[str, Callable[[], Any]] = {
    "iid": lambda: fd.IIDPartitioner(5),
    "permuted": lambda: fd.IIDPartitioner(5, stratified=False),
    "classes": lambda: fd.PathologicalPartitioner(6, 2),
    "shards": lambda: fd.PathologicalPartitioner(6, 2, scheme="shards"),
    "dirichlet": lambda: fd.DirichletPartitioner(6, 0.3),
    "dirichlet clients": lambda: fd.DirichletPartitioner(6, 0.5, by="client"),
    "dirichlet balanced": lambda: fd.DirichletPartitioner(6, 0.5, balance=True),
    "label skew": lambda: fd.LabelSkewPartitioner(6),
    "quantity skew": lambda: fd.QuantitySkewPartitioner(6),
    "label and quantity": lambda: fd.LabelQuantitySkewPartitioner(6),
}
DATA: dict[str, Callable[[], Any]] = {
    **{
        f"digits {name}": functools.partial(lambda make: fd.DigitsDataModule(make(), max_train=300, seed=3), make)
        for name, make in PARTITIONERS.items()
    },
    "public digits": lambda: fd.DigitsDataModule(fd.IIDPartitioner(3), public_fraction=0.2, val_seed=5, split_seed=2),
    "mixture": lambda: fd.MixtureDataModule(fd.DigitsDataModule(max_train=300), num_clients=4),
    "mixture of classes": lambda: fd.MixtureDataModule(
        fd.DigitsDataModule(), num_clients=4, groups=[[0, 1, 2], [3, 4, 5]], mixture="linear"
    ),
    "paired digits": lambda: fd.PairedDigitsDataModule(
        fd.IIDPartitioner(3), missing=0.3, missing_labels=0.2, max_train=200
    ),
    "wrong labels": lambda: fd.PairedDigitsDataModule(fd.DirichletPartitioner(3), wrong_labels=0.3, max_train=200),
    "synthetic": lambda: fd.SyntheticDataModule(4),
    "synthetic own": lambda: fd.SyntheticDataModule(4, labels="own", iid=True, seed=2),
}


def of_data() -> Cases:
    """Yield the partitions of every partitioner, and the batches of data modules."""
    labels = torch.randint(0, 7, (400,), generator=torch.Generator().manual_seed(5))
    for name, make in PARTITIONERS.items():
        for seed in (0, 1, 2):

            def divide(folder: Path, parts: dict[str, Any], make: Any = make, seed: int = seed) -> None:
                draw = torch.Generator().manual_seed(seed)
                parts["partition"] = make().plan(labels, draw).split(labels, draw)

            yield f"partition/{name} {seed}", divide
    for name, make in DATA.items():

        def load(folder: Path, parts: dict[str, Any], make: Any = make) -> None:
            data = make()
            data.setup("fit")
            data.setup("test")
            for split in ("train", "val", "test"):
                loaders = {client: data.client_dataloader(client, split) for client in data.client_ids}
                parts[split] = {client: list(it) if it is not None else None for client, it in loaders.items()}
            public = data.public_dataloader() if getattr(data, "public_fraction", 0) else None
            parts["public"] = None if public is None else list(public)

        yield f"data/{name}", load


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: fm.MLP(6, [5, 4], 3),
    "DigitsCNN": lambda: fm.DigitsCNN(norm="batch"),
    "MnistCNN": lambda: fm.MnistCNN(hidden=16, channels=(4, 8)),
    "CifarCNN": lambda: fm.CifarCNN(),
    "PLayerConvNet": lambda: fm.PLayerConvNet(norm="group"),
    "PLayerCifarNet": lambda: fm.PLayerCifarNet(),
    "TinyNet": lambda: fm.TinyNet(),
    "FendaNet": lambda: fm.FendaNet(),
    "LogisticRegression": lambda: fm.LogisticRegression(),
    "SmallTransformer": lambda: fm.SmallTransformer(20, 3, dim=8, num_heads=2),
    "MultimodalNet": lambda: fm.MultimodalNet({"x": nn.Linear(6, 4), "y": nn.Linear(3, 4)}, 3, fusion="attention"),
    "dual": lambda: dual_by_head(Toy(), "net.3"),
    "dual sum": lambda: dual_by_head(NormNet(), "net.3", fusion="sum"),
    "mixer": lambda: mix_logits(Toy(), Toy(), 0.3),
}


def of_networks() -> Cases:
    """Yield the initial weights of networks and wrapped modules."""
    for name, make in NETWORKS.items():

        def build(folder: Path, parts: dict[str, Any], make: Any = make) -> None:
            parts["models"] = dict(seeded(make).state_dict())

        yield f"initial/{name}", build

    def addressed(folder: Path, parts: dict[str, Any]) -> None:
        streams = [("participation", 3), ("toy", "a", "train"), (0, 2, "client", "fit", 1)]
        parts["draws"] = [torch.randn(8, generator=generator(*stream)) for stream in streams]

    yield "initial/addresses", addressed


COMMANDS = ["fedavg", "apfl", "fenda", "ifca", "fliu", "fedbuff", "playerfl", "harmony", "feddf", "swift"]
NEEDS = {"harmony": ["data/paired_digits.yaml", "models/paired_digits.yaml"]}


def of_commands() -> Cases:
    """Yield runs from the command line, of which the scores in the run's folder count."""
    for name in COMMANDS:

        def run(folder: Path, parts: dict[str, Any], name: str = name) -> None:
            from fedlightning.cli import main

            files = ["quickstart.yaml", *NEEDS.get(name, []), f"algorithms/{name}.yaml"]
            words = [word for file in files for word in ("--config", str(CONFIGS / file))]
            words += [f"--trainer.default_root_dir={folder}", "--trainer.max_rounds=1", "--trainer.logger=false"]
            words += ["--data.partitioner.num_clients=3", "--data.max_train=150", "--data.max_test=60"]
            if "local_steps" not in (CONFIGS / f"algorithms/{name}.yaml").read_text():
                words.append("--trainer.local_epochs=1")
            parts["status"] = main(["fit", *words, "--trainer.enable_progress_bar=false"])
            tables = sorted(folder.rglob("metrics.csv"))
            parts["rows"] = [sorted(csv.reader(table.read_text().splitlines())) for table in tables]

        yield f"command/{name}", run


def all_cases() -> dict[str, Run]:
    """Return all cases by name."""
    kinds = (of_methods, of_compositions, of_options, of_data, of_networks, of_commands)
    return {name: run for kind in kinds for name, run in kind()}
