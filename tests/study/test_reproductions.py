"""The configurations of published experiments: they say what the papers say, and they run (on made-up data here)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedlightning.commands.run import Commands
from tests.helpers import mostly_slow

CONFIGS = Path(__file__).parents[2] / "configs"
HEART, MNIST, FASHION = (CONFIGS / name for name in ("heart_disease", "mnist_fliu", "fashion_mnist_player"))

# Optimizer and learning rate of every method, as the papers tuned them.
HEART_RATES = {
    "fedavg": ("AdamW", 0.1),
    "fedadam": ("AdamW", 1e-5),
    "fedprox": ("AdamW", 1e-3),
    "scaffold": ("SGD", 0.1),
    "apfl": ("AdamW", 0.1),
    "fenda": ("AdamW", 1e-3),
    "finetuning": ("AdamW", 0.1),
    "local": ("AdamW", 1e-3),
    "central": ("AdamW", 1e-3),
}
FASHION_RATES = {
    "local": 1e-3,
    "fedavg": 5e-4,
    "fedprox": 5e-4,
    "pfedme": 5e-2,
    "ditto": 5e-4,
    "localadaptation": 5e-4,
    "fedbabu": 1e-3,
    "fedlp": 5e-4,
    "fedlama": 5e-4,
    "pfedla": 5e-4,
    "playerfl": 1e-3,
    "playerflrandom": 1e-3,
}
MNIST_GAMMAS = {"fliu_adaptive": "adaptive", "fliu_010": 0.1, "fliu_025": 0.25, "fliu_050": 0.5, "fliu_090": 0.9}
PARAMETERS = {"apfl": 152, "fenda": 151}  # at one client; the others have 14
CHECKPOINTS = {"LocalCheckpoint": "best_local", "GlobalCheckpoint": "best_global"}

FILES = sorted(path for folder in (HEART, MNIST, FASHION) for path in folder.glob("**/*.yaml"))
METHODS = [path for path in FILES if path.parent.name != "overrides" and path.stem != "network"]
OVERRIDES = [path for path in FILES if path not in METHODS]


def name_of(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


def built(*files: Path) -> Commands:
    """Model, callbacks and data module; no data are read."""
    return Commands("fit", [word for file in files for word in ("--config", str(file))])


def algorithm(cli: Commands, name: str) -> Any:
    """The callback of that name."""
    return next(callback for callback in cli.trainer.callbacks if type(callback).__name__ == name)


@pytest.fixture(scope="module")
def heart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four files of the UCI repository, with a few made-up patients."""
    root, rng = tmp_path_factory.mktemp("heart"), np.random.default_rng(0)
    for hospital, patients in {"cleveland": 40, "hungarian": 36, "switzerland": 24, "va": 30}.items():
        table = rng.uniform(0, 5, (patients, 14)).round(1)
        table[:, 2], table[:, 6], table[:, 13] = (rng.integers(low, 4, patients) for low in (1, 0, 0))
        table[:, 6] = table[:, 6].clip(max=2)
        (root / f"processed.{hospital}.data").write_text("\n".join(",".join(map(str, row)) for row in table))
    return root


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MNIST's four files with 80 and 40 images of noise."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, count in (("train", 80), ("t10k", 40)):
        arrays = {
            f"{part}-images-idx3-ubyte": rng.integers(0, 256, (count, 28, 28)),
            f"{part}-labels-idx1-ubyte": np.arange(count) % 10,
        }
        for name, array in arrays.items():
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
            (root / name).write_bytes(header + array.astype(np.uint8).tobytes())
    return root


# -- what the files say ------------------------------------------------------------------------------------------------
def test_files_stand_alone_and_say_what_they_are() -> None:
    for path in METHODS:
        text, name = path.read_text(), name_of(path)
        assert text.startswith("# ") and f"--config configs/{name}.yaml" in text, name
        config = yaml.safe_load(text)
        assert set(config) == {"trainer", "model", "data"}, name
        assert config["trainer"]["name"] == path.stem
        assert config["trainer"]["default_root_dir"] == f"runs/{path.relative_to(CONFIGS).parts[0]}", name


@pytest.mark.parametrize("name", mostly_slow(HEART_RATES, ("fedadam", "scaffold", "apfl", "local")))
def test_heart_disease_is_the_papers_preset(name: str) -> None:
    cli = built(HEART / f"{name}.yaml")
    optimizer = cli.model.configure_optimizers()
    given, options = cli.trainer.arguments, optimizer.defaults
    assert (type(optimizer).__name__, options["lr"]) == HEART_RATES[name]
    assert options["weight_decay"] == (0.01 if type(optimizer).__name__ == "AdamW" else 0)  # torch's own defaults
    if name in ("local", "central"):
        assert given["max_rounds"] * given["local_epochs"] == 50 and given["local_steps"] is None
    else:
        assert (given["max_rounds"], given["local_steps"]) == (15, 100)
    assert (cli.datamodule.batch_size, cli.datamodule.val_fraction) == (4, 0.2)
    kept = {key: value for callback in cli.trainer.callbacks for key, value in callback.hyperparameters().items()}
    assert kept["monitor"] == "val_loss" and kept["stage"] in ("L1", "G")  # after aggregation
    if name == "fedadam":
        assert [kept[key] for key in ("server_lr", "beta1", "beta2", "tau")] == [0.1, 0.9, 0.99, 1e-9]
    elif name == "fedprox":
        assert kept["mu"] == 0.01
    elif name == "scaffold":
        assert kept["server_lr"] == 0.1
    elif name == "apfl":
        assert [kept[key] for key in ("alpha", "alpha_lr", "mix")] == [0.5, 0.1, "logits"]


def test_equal_steps() -> None:
    for name in ("local_1500", "central_1500"):
        given = built(HEART / f"equal_steps/{name}.yaml").trainer.arguments
        assert given["max_rounds"] * given["local_steps"] == 1500


@pytest.mark.parametrize("name", mostly_slow(["fedadam", "scaffold", "equal_steps/central_1500"], ["scaffold"]))
def test_equal_parameters_change_the_network_only(name: str) -> None:
    plain, wide = built(HEART / f"{name}.yaml"), built(HEART / f"{name}.yaml", HEART / "equal_parameters/network.yaml")
    assert [sum(p.numel() for p in cli.model.parameters()) for cli in (plain, wide)] == [14, 151]
    configs = [yaml.safe_load(cli.trainer.config or "") for cli in (plain, wide)]
    for config in configs:
        del config["model"]["init_args"]["net"]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    "path", mostly_slow(sorted(MNIST.glob("*.yaml")), ("apfl", "fliu_025")), ids=lambda path: path.stem
)
def test_mnist_is_the_papers_setting(path: Path) -> None:
    cli = built(path)
    optimizer, given = cli.model.configure_optimizers(), cli.trainer.arguments
    wanted = ("SGD", 0.1) if path.stem == "apfl" else ("Adam", 0.01)
    assert (type(optimizer).__name__, optimizer.defaults["lr"]) == wanted
    assert (given["max_rounds"], given["local_epochs"], given["lr_decay"]) == (100, 5, 0.99)
    assert cli.datamodule.batch_size == 50
    partitioner = cli.datamodule.partitioner
    assert (partitioner.num_clients, partitioner.classes_per_client, partitioner.scheme) == (100, 2, "classes")
    if path.stem in MNIST_GAMMAS:
        assert algorithm(cli, "FLIU").gamma == MNIST_GAMMAS[path.stem]
    if path.stem != "clt":  # nothing is aggregated there
        assert [callback.weighting for callback in cli.trainer.callbacks] == ["uniform"]


@pytest.mark.parametrize("name", mostly_slow(["iid", "ls", "qs", "lsqs"], ["lsqs"]))
def test_mnist_partitions_replace_path(name: str) -> None:
    partitioner = built(MNIST / "fedavg.yaml", MNIST / f"overrides/{name}.yaml").datamodule.partitioner
    kinds = {"iid": "IID", "ls": "LabelSkew", "qs": "QuantitySkew", "lsqs": "LabelQuantitySkew"}
    assert type(partitioner).__name__ == f"{kinds[name]}Partitioner"
    assert partitioner.num_clients == 100 and getattr(partitioner, "alpha", 1.0) == 1.0


@pytest.mark.parametrize("name", mostly_slow(FASHION_RATES, ("pfedme", "playerfl")))
def test_fashion_mnist_is_the_papers_setting(name: str) -> None:
    cli = built(FASHION / f"{name}.yaml")
    optimizer, given = cli.model.configure_optimizers(), cli.trainer.arguments
    assert type(optimizer).__name__ == ("SGD" if name == "pfedme" else "AdamW")
    assert optimizer.defaults["lr"] == FASHION_RATES[name]
    assert (given["max_rounds"], given["local_epochs"], given["evaluation"].stages) == (75, 1, ("G", "L1", "L2"))
    partitioner = cli.datamodule.partitioner
    assert (partitioner.num_clients, partitioner.alpha, cli.datamodule.batch_size) == (5, 0.5, 128)
    assert sum(p.numel() for p in cli.model.parameters()) == 1_052_758


@pytest.mark.parametrize("folder", mostly_slow([MNIST, FASHION], ["mnist_fliu"]), ids=name_of)
def test_reduced_is_the_same_with_less(folder: Path) -> None:
    full, less = built(folder / "fedavg.yaml"), built(folder / "fedavg.yaml", folder / "overrides/reduced.yaml")
    assert less.trainer.arguments["max_rounds"] < full.trainer.arguments["max_rounds"]
    assert less.datamodule.max_train < (full.datamodule.max_train or 60_000)
    kept = {**vars(full.datamodule.partitioner), "num_clients": less.datamodule.partitioner.num_clients}
    assert vars(less.datamodule.partitioner) == kept
    assert less.model.configure_optimizers().defaults == full.model.configure_optimizers().defaults


def test_every_file_is_covered() -> None:
    assert {path.stem for path in HEART.glob("*.yaml")} == {*HEART_RATES}
    assert {path.stem for path in MNIST.glob("*.yaml")} == {"fedavg", "clt", "apfl", *MNIST_GAMMAS}
    assert {path.stem for path in FASHION.glob("*.yaml")} == {*FASHION_RATES}
    assert {path.stem for path in OVERRIDES} == {"network", "iid", "ls", "qs", "lsqs", "reduced"}
    assert all(path.read_text().startswith("# ") for path in OVERRIDES)


# -- and that they run -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "path",
    mostly_slow([path for path in METHODS if HEART in path.parents], ("scaffold", "fenda", "central_1500")),
    ids=name_of,
)
@pytest.mark.fast_cases(1)
def test_heart_disease_runs(path: Path, heart: Path, tmp_path: Path) -> None:
    work = "local_epochs" if "local_epochs" in path.read_text() else "local_steps"
    cli = run(path, tmp_path, [f"--data.init_args.root={heart}", f"--trainer.{work}=1"])
    selected = {row["checkpoint"] for row in cli.trainer.results} - {"latest"}
    kept = {type(callback).__name__ for callback in cli.trainer.callbacks} & {*CHECKPOINTS}
    assert selected == {CHECKPOINTS[name] for name in kept} != set()
    deployed = cli.trainer.module(None if path.stem.startswith("central") else "va")
    wanted = 151 if path.parent.name == "equal_parameters" else PARAMETERS.get(path.stem, 14)
    assert sum(p.numel() for p in deployed.parameters()) == wanted


@pytest.mark.parametrize("name", mostly_slow(["iid", "ls", "qs", "lsqs"], ["ls"]))
def test_reduced_stacks_on_the_partitions(name: str) -> None:
    files = [MNIST / "fedavg.yaml", *(MNIST / f"overrides/{file}.yaml" for file in (name, "reduced"))]
    assert built(*files).datamodule.partitioner.num_clients == 50


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in METHODS if HEART not in path.parents], ids=name_of)
def test_image_experiments_run(path: Path, images: Path, tmp_path: Path) -> None:
    words = [f"--data.init_args.root={images}", "--data.init_args.partitioner.init_args.num_clients=5"]
    cli = run(path, tmp_path, [*words, "--trainer.local_epochs=1"])
    assert {row["stage"] for row in cli.trainer.results} >= {"L1", "L2"}


def run(path: Path, out: Path, words: list[str]) -> Commands:
    """One round and its test scores."""
    words = [*words, f"--trainer.default_root_dir={out}", "--trainer.max_rounds=1", "--trainer.logger=false"]
    cli = Commands("fit", ["--config", str(path), *words, "--trainer.enable_progress_bar=false"])
    cli.trainer.fit(cli.model, cli.datamodule)
    cli.trainer.test(checkpoint="all")
    assert all(row["mean"] is not None for row in cli.trainer.results if row["metric"] == "test_accuracy")
    return cli
