"""Every YAML file in configs/ runs (digits) or parses (data that is not here)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from sklearn.datasets import load_diabetes

from fedlightning.cli import main
from fedlightning.commands.run import Commands
from fedlightning.config.value_checks import check_values
from fedlightning.scores.rows import read_rows
from fedlightning.trainer import FederatedTrainer
from tests.datamodules.test_tcga_brca import files as survival_files
from tests.helpers import mostly_slow

CONFIGS = Path(__file__).parents[1] / "configs"
ALGORITHMS = sorted(CONFIGS.glob("algorithms/*.yaml"))
DATA = sorted(CONFIGS.glob("data/*.yaml"))
MODELS = sorted(CONFIGS.glob("models/*.yaml"))
MODALITIES = [f"--config={CONFIGS / kind / 'paired_digits.yaml'}" for kind in ("data", "models")]
NEEDS = {"fedbn": ["--model.net.norm=batch"], "fedmultimodal": MODALITIES, "harmony": MODALITIES}
RUN = ("fenda", "ifca")
FITS = {
    "heart_disease": "heart_tiny",
    "mnist": "mnist_cnn",
    "fashion_mnist": "mnist_cnn",
    "emnist": "emnist_cnn",
    "cifar10": "cifar_cnn",
    "tabular": "tabular_regressor",
    "hospital_stays": "hospital_stays_mlp",
    "paired_digits": "paired_digits",
    "spoken_digits": "spoken_digits",
    "synthetic_devices": "synthetic_logistic",
    "mnist_power_law": "mnist_logistic",
    "tcga_brca": "tcga_cox",
    "shakespeare": "char_lstm",
    "femnist": "femnist_cnn",
    "lung": "lung_cox",
    "image_folders": "image_resnet",
    "cifar100": "cifar100_cnn",
    "svhn": "svhn_cnn",
    "uci_har": "har_cnn",
    "isic2019": "isic_efficientnet",
    "camelyon16": "camelyon_mil",
    "ptb_xl": "ptb_resnet",
    "ixi_tiny": "ixi_unet",
    "growing_shift_digits": "digits_cnn",
    "shifted_digits": "digits_cnn",
    "drifting_digits": "digits_cnn",
    "huggingface": "mnist_cnn",
    "tiny_imagenet": "tiny_imagenet_resnet",
    "ku_har": "ku_har_cnn",
    "utd_mhad": "utd_mhad",
    "notes": "notes_attention",
}


def small(out: Path) -> list[str]:
    return [
        f"--trainer.default_root_dir={out}",
        "--trainer.max_rounds=1",
        "--trainer.enable_progress_bar=false",
        "--trainer.logger=false",
        "--data.partitioner.num_clients=3",
        "--data.max_train=150",
        "--data.max_test=60",
    ]


def ids(path: Path) -> str:
    return path.stem


def stacked(path: Path, out: Path) -> list[str]:
    needs = NEEDS.get(path.stem, [])
    words = ["--config", str(CONFIGS / "quickstart.yaml"), *needs, "--config", str(path), *small(out)]
    return words if "local_steps" in path.read_text() else [*words, "--trainer.local_epochs=1"]


@pytest.fixture(scope="module")
def quickstart() -> Commands:
    """A parser for all files: to build one takes longer than to use it."""
    return Commands("fit", ["-c", str(CONFIGS / "quickstart.yaml")])


@pytest.mark.parametrize("path", ALGORITHMS, ids=ids)
def test_algorithms_stack_on_the_quickstart(path: Path, quickstart: Commands, tmp_path: Path) -> None:
    """Every option is known and of its type, and the callbacks can be made."""
    found = quickstart.parser.parse_args(stacked(path, tmp_path))
    check_values(found.as_dict(), FederatedTrainer)
    callbacks = quickstart.parser.instantiate_classes(found.clone()).trainer.callbacks
    assert len(callbacks) == len(yaml.safe_load(path.read_text())["trainer"]["callbacks"])
    assert path.stem in [type(callback).__name__.lower() for callback in callbacks]


@pytest.mark.parametrize("path", mostly_slow(ALGORITHMS, RUN), ids=ids)
def test_algorithms_run_on_the_quickstart(path: Path, tmp_path: Path) -> None:
    assert main(["fit", *stacked(path, tmp_path)]) == 0
    summary = json.loads((tmp_path / "quickstart/version_0/summary.json").read_text())
    assert path.stem in [name.lower() for name in summary["callbacks"]]
    assert len(summary["callbacks"]) == len(yaml.safe_load(path.read_text())["trainer"]["callbacks"])
    assert any(row["split"] == "test" and row["mean"] is not None for row in summary["results"])


def test_the_quickstart_runs_as_it_is(tmp_path: Path) -> None:
    assert main(["fit", "--config", str(CONFIGS / "quickstart.yaml"), *small(tmp_path)]) == 0
    checkpoints = {row["checkpoint"] for row in read_results(tmp_path / "quickstart/version_0")}
    assert checkpoints == {"latest", "best_global", "best_local"}


@pytest.mark.parametrize("name", mostly_slow(["digits_cnn_bn", "digits_mlp"], ["digits_mlp"]))
def test_digits_from_three_files(name: str, tmp_path: Path) -> None:
    files = [CONFIGS / "data/digits.yaml", CONFIGS / f"models/{name}.yaml", CONFIGS / "algorithms/fedprox.yaml"]
    words = [word for file in files for word in ("--config", str(file))]
    assert main(["fit", *words, *small(tmp_path)]) == 0


@pytest.mark.parametrize("then", ["", pytest.param("report and partition", marks=pytest.mark.slow)])
def test_a_table_of_hospitals_runs(then: str, tmp_path: Path) -> None:
    table = load_diabetes(scaled=False)
    hospitals = ["Rome", "Oslo", "Bern"]
    rows = [
        ",".join([*map(str, x), str(y), hospitals[i % 3]])
        for i, (x, y) in enumerate(zip(table.data[:120], table.target, strict=False))
    ]
    (tmp_path / "patients.csv").write_text("\n".join([",".join([*table.feature_names, "progression,hospital"]), *rows]))
    files = [
        CONFIGS / "data/tabular.yaml",
        CONFIGS / "models/tabular_regressor.yaml",
        CONFIGS / "algorithms/fedavg.yaml",
    ]
    words = [word for file in files for word in ("--config", str(file))]
    options = [f"--data.path={tmp_path / 'patients.csv'}", f"--trainer.default_root_dir={tmp_path}"]
    options += ["--trainer.max_rounds=2", "--trainer.enable_progress_bar=false", "--trainer.name=table"]
    assert main(["fit", *words, *options]) == 0
    summary = json.loads((tmp_path / "table/version_0/summary.json").read_text())
    found = {row["metric"]: row["mean"] for row in summary["results"] if row["split"] == "test"}
    assert {"test_loss", "test_mse", "test_rmse", "test_mae", "test_r2", "test_pearson"} <= set(found)
    if then:
        assert main(["report", str(tmp_path / "table/version_0"), f"--out={tmp_path / 'report'}", "--metric=rmse"]) == 0
        assert main(["partition", "--config", str(files[0]), options[0], f"--out={tmp_path / 'partition'}"]) == 0


def test_stays_in_hospitals_agree_and_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = ["age,sex,lactate,heart_rate,unit,diagnosis,patient,hospital,died"]
    for i in range(240):
        age, sex, unit = f"{rng.normal(60, 12):.0f}", "fm"[i % 2], ["CCU", "CSICU", "MICU", "SICU"][i % 4]
        dx, hospital = ["I21", "A41", "J44", f"Z{i}"][int(rng.integers(4))], "ABC"[i // 2 % 3]
        numbers = f"{rng.gamma(2):.1f},{rng.normal(88, 9):.0f}"
        rows.append(f"{age if i % 11 else ''},{sex},{numbers},{unit},{dx},p{i // 2},{hospital},{i % 5 // 4}")
    (tmp_path / "stays.csv").write_text("\n".join(rows))
    files = ["data/hospital_stays.yaml", "models/hospital_stays_mlp.yaml", "algorithms/fedavg.yaml"]
    words = [word for file in files for word in ("--config", str(CONFIGS / file))]
    words += [f"--data.path={tmp_path / 'stays.csv'}", f"--trainer.default_root_dir={tmp_path}", "--trainer.name=stays"]
    assert main(["fit", *words, "--trainer.max_rounds=2", "--trainer.enable_progress_bar=false"]) == 0
    kept = json.loads((tmp_path / "stays/version_0/statistics.json").read_text())
    assert set(kept["totals"]["words diagnosis"]) == {"A41", "I21", "J44"}
    assert (
        main(["predict", "--run", str(tmp_path / "stays/version_0"), "--client=B", f"--out={tmp_path / 'p.pt'}"]) == 0
    )
    assert not torch.load(tmp_path / "p.pt").isnan().any()


@pytest.mark.parametrize("name", mostly_slow(sorted(FITS), ("heart_disease", "tabular", "spoken_digits")))
def test_other_data_parse_with_their_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = [CONFIGS / f"data/{name}.yaml", CONFIGS / f"models/{FITS[name]}.yaml", CONFIGS / "algorithms/fedavg.yaml"]
    words = [word for file in files for word in ("--config", str(file))]
    assert main(["fit", *words, "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["data"]["class_path"].startswith("fedlightning.datamodules.")
    assert printed["trainer"]["callbacks"][-1]["class_path"] == "fedlightning.callbacks.FedAvg"


@pytest.mark.parametrize("path", MODELS, ids=ids)
def test_models_are_made(path: Path) -> None:
    if path.stem == "ixi_unet":
        pytest.importorskip("monai")
    cli = Commands("fit", ["--config", str(path), "--config", str(CONFIGS / "data/digits.yaml")])
    assert cli.model.configure_optimizers() is not None
    assert getattr(cli.model, "num_classes", 2) in (2, 3, 5, 6, 8, 10, 18, 27, 47, 62, 80, 100, 200)


@pytest.mark.parametrize(
    "name",
    [
        "matching",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("digits", "no_incentive", "disjoint_classes")),
    ],
)
def test_pi_fl_on_mixtures_of_digits(name: str, tmp_path: Path) -> None:
    files = [CONFIGS / "pi_fl/digits.yaml", *([CONFIGS / f"pi_fl/{name}.yaml"] if name != "digits" else [])]
    words = [word for file in files for word in ("--config", str(file))]
    words += [word for word in small(tmp_path) if "partitioner" not in word and "data.max" not in word]
    words += [
        "--data.num_clients=4",
        "--data.source.max_train=160",
        "--trainer.max_rounds=2",
        "--trainer.local_epochs=1",
    ]
    assert main(["fit", *words, "--data.source.max_test=60"]) == 0
    (run,) = tmp_path.glob("*/version_0")
    assert (run / "figures/ledger.png").exists()
    assert (run / "clusters.csv").exists() == (name != "no_incentive")


@pytest.mark.parametrize("path", mostly_slow(sorted(CONFIGS.glob("multimodal/*.yaml")), ["fedcovid"]), ids=ids)
def test_several_modalities(path: Path, tmp_path: Path) -> None:
    """Few rounds and few samples of what the file says, both stages of Harmony among them."""
    words = ["fit", "--config", str(path), f"--trainer.default_root_dir={tmp_path}", "--trainer.max_rounds=2"]
    words += [
        "--data.max_train=320",
        "--data.max_test=100",
        "--trainer.enable_progress_bar=false",
        "--trainer.logger=false",
    ]
    if "harmony" in path.stem:
        words.append("--trainer.callbacks.stage1=1")
    assert main([*words, "--trainer.local_epochs=1"]) == 0
    (summary,) = tmp_path.glob("*/version_0/summary.json")
    assert "failures" not in json.loads(summary.read_text())
    assert any(row["split"] == "test" and row["mean"] is not None for row in read_results(summary.parent))


PI_FL_FIGURES = {"figure2g": [], "figure3": ["pi_fl/digits"], "figure4": ["pi_fl/digits"]}


@pytest.mark.parametrize("name", mostly_slow(["figure2g", "figure3", "figure4"], []))
def test_figures_of_pi_fl(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run of the reduced form, and the paper's size of those that have one parses."""
    files = [CONFIGS / f"{stem}.yaml" for stem in [*PI_FL_FIGURES[name], f"pi_fl/{name}"]]
    words = [word for file in files for word in ("--config", str(file))]
    assert main(["fit", *words, f"--trainer.default_root_dir={tmp_path}", "--dry-run"]) == 0
    assert "PIFL" in capsys.readouterr().out and not list(tmp_path.iterdir())
    if name == "figure2g":
        words += [
            "--config",
            str(CONFIGS / "pi_fl/overrides/emnist_disjoint.yaml"),
            "--trainer.callbacks.num_clusters=13",
        ]
    else:
        words[1] = str(CONFIGS / "pi_fl/cifar10.yaml")
    assert main(["fit", *words, "--data.source.root=elsewhere", "--trainer.max_rounds=500", "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["data"]["init_args"]["source"]["init_args"]["root"] == "elsewhere"
    assert printed["data"]["init_args"]["num_clients"] == 100
    assert printed["data"]["init_args"]["shift"] == (name == "figure3")
    if name == "figure2g":
        groups = printed["data"]["init_args"]["groups"]
        assert sorted(label for group in groups for label in group) == list(range(10, 62)) and len(groups) == 13


@pytest.mark.parametrize("name", ["cifar10", "table1_reduced"])
def test_pi_fl_on_cifar10_parses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", str(CONFIGS / f"pi_fl/{name}.yaml"), "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["class_path"].endswith("MixtureDataModule")


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(("clusters/digits", "algorithms/fedgroup"), marks=pytest.mark.slow),
        ("clusters/digits", "clusters/classes", "algorithms/fesemma"),
        pytest.param(("clusters/fesem_digits", "clusters/fesem/fesem_3"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_clusters_of_digits(files: tuple[str, ...], tmp_path: Path) -> None:
    words = [word for name in files for word in ("--config", str(CONFIGS / f"{name}.yaml"))]
    words += [*small(tmp_path)[:4], "--trainer.local_epochs=1", "--trainer.evaluation.every=1"]
    size = ["partitioner.num_clients=3", "max_train=150", "max_test=60"]
    if "fesem_digits" not in files[0]:
        size = ["num_clients=4", "source.max_train=160", "source.max_test=60"]
    assert main(["fit", *words, *[f"--data.{option}" for option in size]]) == 0
    (run,) = tmp_path.glob("*/version_0")
    assert (run / "figures/clusters.png").exists()


@pytest.mark.parametrize("path", mostly_slow(sorted(CONFIGS.glob("tcga_brca/*.yaml")), ["fedadagrad"]), ids=ids)
def test_flambys_survival_benchmark(path: Path, tmp_path: Path) -> None:
    """FLamby's settings on made files of its format, where a region of three test patients has no comparable pair."""
    root = survival_files(tmp_path / "data")
    words = ["--config", str(path), *small(tmp_path)[:4], f"--data.root={root}", "--trainer.local_steps=3"]
    assert main(["fit", *words]) == 0
    summary = json.loads((tmp_path / path.stem / "version_0/summary.json").read_text())
    rows = [row for row in summary["results"] if (row["stage"], row["data"], row["split"]) == ("G", "local", "test")]
    found = {row["metric"]: row for row in rows}
    assert found["test_c_index"]["clients"] == 5 and "failures" not in summary


def test_shakespeares_roles(tmp_path: Path) -> None:
    speeches = [f"{role}:\n" + 20 * f"Good morrow, {role}. " for role in ("ROMEO", "JULIET", "Nurse") for _ in range(3)]
    (tmp_path / "input.txt").write_text("\n\n".join(speeches))
    words = ["--config", str(CONFIGS / "shakespeare/fedavg.yaml"), *small(tmp_path)[:4], "--trainer.participation=2"]
    words += [f"--data.root={tmp_path / 'input.txt'}", "--data.min_chars=1000", "--model.net.hidden=8"]
    assert main(["fit", *words, "--trainer.evaluation.every=1", "--data.step=40"]) == 0
    summary = json.loads((tmp_path / "shakespeare_fedavg/version_0/summary.json").read_text())
    assert summary["num_clients"] == 3 and "failures" not in summary


def test_synthetic_devices_with_stragglers(tmp_path: Path) -> None:
    words = ["--config", str(CONFIGS / "synthetic/fedprox.yaml"), *small(tmp_path)[:4], "--trainer.local_epochs=2"]
    assert main(["fit", *words, "--trainer.evaluation.every=1", "--data.num_clients=12", "--data.seed=3"]) == 0
    (run,) = tmp_path.glob("*/version_0")
    assert ("G", "test") in {(row["stage"], row["split"]) for row in read_results(run)}


def test_the_experiment_with_stragglers(tmp_path: Path) -> None:
    words = ["--config", str(CONFIGS / "time/fedprox_stragglers.yaml"), *small(tmp_path)[:4]]
    words += ["--trainer.local_epochs=2", "--trainer.participation=3", "--data.partitioner.num_clients=6"]
    assert main(["fit", *words, "--data.max_train=120", "--data.max_test=60"]) == 0
    (run,) = tmp_path.glob("*/version_0")
    assert "G" in {row["stage"] for row in read_results(run)} and "failures" not in json.loads(
        (run / "summary.json").read_text()
    )


@pytest.mark.parametrize("name", mostly_slow(["torus", "stragglers"], ["torus"]))
def test_digits_without_a_server(name: str, tmp_path: Path) -> None:
    files = [CONFIGS / "quickstart.yaml", CONFIGS / f"decentralised/{name}.yaml"]
    words = [word for file in files for word in ("--config", str(file))] + small(tmp_path)
    words += ["--data.partitioner.num_clients=6"] if name == "stragglers" else ["--data.partitioner.num_clients=4"]
    assert main(["fit", *words]) == 0
    (run,) = tmp_path.glob("*/version_0")
    summary = json.loads((run / "summary.json").read_text())
    assert "failures" not in summary
    assert {row["stage"] for row in read_results(run)} == {"G", "L1", "L2"}
    assert summary["per_round"][0].get("time") == (10.0 if name == "stragglers" else None)
    assert summary["per_round"][0]["bytes_down"] == 0 < summary["per_round"][0]["bytes_up"]


@pytest.mark.parametrize("hospitals", mostly_slow([["cleveland"], None], [["cleveland"]]), ids=["one site's", "all"])
def test_sites_in_one_process(hospitals: list[str] | None, tmp_path: Path) -> None:
    """The two files of a site run on its own file alone, and on the four."""
    rng = np.random.default_rng(0)
    for name in hospitals or ("cleveland", "hungarian", "switzerland", "va"):
        rows = [
            f"{rng.integers(30, 80)},1,{1 + i % 4},140,{rng.integers(120, 400)},0,{i % 3},112,0,1.0,?,?,?,{i % 2}"
            for i in range(40)
        ]
        (tmp_path / f"processed.{name}.data").write_text("\n".join(rows))
    words = [f"--config={CONFIGS / 'sites' / name}.yaml" for name in ("run", "data")]
    words += [
        f"--data.root={tmp_path}",
        *small(tmp_path)[:4],
        "--trainer.local_steps=2",
        "--trainer.evaluation.every=1",
    ]
    assert main(["fit", *words, *([] if hospitals else ["--data.hospitals=null"])]) == 0
    summary = json.loads((tmp_path / "sites/version_0/summary.json").read_text())
    assert summary["num_clients"] == len(hospitals or range(4)) and "failures" not in summary
    assert {path.stem for path in (CONFIGS / "sites").iterdir()} == {"run", "data"}


@pytest.mark.parametrize("path", mostly_slow(sorted(CONFIGS.glob("clusters/fesem/*.yaml")), ["fesem_3"]), ids=ids)
def test_the_comparison_of_fesem_parses(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "-c", str(CONFIGS / "clusters/fesem_emnist.yaml"), "-c", str(path), "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["participation"] == 9 and len(printed["trainer"]["callbacks"]) == 2


@pytest.mark.parametrize(
    "path", mostly_slow(sorted(CONFIGS.glob("heterogeneous/overrides/*.yaml")), ["heterofl"]), ids=ids
)
def test_submodels_of_digits(path: Path, tmp_path: Path) -> None:
    files = [CONFIGS / "heterogeneous/digits_submodels.yaml", path]
    words = [word for file in files for word in ("--config", str(file))]
    assert main(["fit", *words, *small(tmp_path), "--trainer.local_epochs=1"]) == 0
    (run,) = tmp_path.glob("*/version_0")
    assert "failures" not in json.loads((run / "summary.json").read_text())
    assert any(row["stage"] == "G" and row["split"] == "test" for row in read_results(run))


@pytest.mark.parametrize("path", mostly_slow(sorted(CONFIGS.glob("heterogeneous/models/*.yaml")), ["fedmd"]), ids=ids)
def test_models_of_digits(path: Path, tmp_path: Path) -> None:
    files = [CONFIGS / "heterogeneous/digits_models.yaml", path]
    words = [word for file in files for word in ("--config", str(file))]
    assert main(["fit", *words, *small(tmp_path), "--trainer.local_epochs=1"]) == 0
    (run,) = tmp_path.glob("*/version_0")
    summary = json.loads((run / "summary.json").read_text())
    assert "failures" not in summary and len(summary["architectures"]) == 3
    assert any(row["stage"] == "L1" and row["split"] == "test" for row in read_results(run))


@pytest.mark.parametrize(
    "name",
    mostly_slow(["mnist_models", "cifar10_submodels", "cifar10_fedgh", "fashion_mnist_fedtype"], ["cifar10_submodels"]),
)
def test_heterogeneous_settings_of_papers_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "-c", str(CONFIGS / f"heterogeneous/{name}.yaml"), "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["name"] == name


@pytest.mark.slow
def test_a_small_llama_learns_speeches_without_a_file_or_network(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = ["--trainer.max_rounds=3", f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false"]
    assert main(["fit", f"--config={CONFIGS / 'language/speeches.yaml'}", *options]) == 0
    rows = read_rows(next(tmp_path.glob("speeches/version_0/metrics.csv")))
    found = [row for row in rows if (row.metric, row.stage) == ("val_perplexity", "G")]
    by_round = [[row.value for row in found if row.round == number] for number in (1, 2, 3)]
    assert [len(values) for values in by_round] == [4, 4, 4]
    first, _, last = (sum(values) / 4 for values in by_round)
    assert last < first < 258 and last < 40


def test_every_data_file_is_covered() -> None:
    assert {path.stem for path in DATA} == {"digits", *FITS}
    assert {FITS[name] for name in FITS} <= {path.stem for path in MODELS}


def test_files_say_what_they_are() -> None:
    others = [*CONFIGS.glob("heterogeneous/**/*.yaml"), *CONFIGS.glob("sites/*.yaml"), CONFIGS / "quickstart.yaml"]
    silent = [path for path in [*ALGORITHMS, *DATA, *MODELS, *others] if not path.read_text().startswith("# ")]
    assert not silent


def read_results(run: Path) -> list[dict[str, object]]:
    results: list[dict[str, object]] = json.loads((run / "summary.json").read_text())["results"]
    return results


def test_unseen_clients(tmp_path: Path) -> None:
    assert main(["fit", "--config", str(CONFIGS / "unseen_clients.yaml"), *small(tmp_path)]) == 0
    results = read_results(tmp_path / "unseen_clients/version_0")
    unseen = [row for row in results if row["model"] == "unseen" and row["split"] == "test"]
    assert {(row["checkpoint"], row["stage"]) for row in unseen} == {
        ("latest", "G"),
        ("latest", "L1"),
        ("best_global", "G"),
    }
    assert all(len(row["per_client"]) == 1 for row in unseen)


@pytest.mark.slow
def test_a_hundred_thousand_clients(tmp_path: Path) -> None:
    words = ["--trainer.max_rounds=2", "--trainer.participation=3", "--trainer.evaluation.clients=5"]
    words += [f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_progress_bar=false"]
    assert main(["fit", "--config", str(CONFIGS / "many_clients.yaml"), *words]) == 0
    summary = json.loads((tmp_path / "many_clients/version_0/summary.json").read_text())
    assert (summary["num_clients"], summary["evaluation"]["clients"]) == (100_000, 5)
    assert {
        len(row["per_client"]) for row in summary["results"] if row["split"] == "test" and row["stage"] != "L2"
    } == {5}
