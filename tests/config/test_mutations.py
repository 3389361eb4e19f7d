"""Mutated configurations: each is refused in one sentence that names the key and the rule, before anything runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlightning.cli import main
from fedlightning.commands.run import Commands
from fedlightning.config.input_errors import InputError
from fedlightning.config.parsing import CommandLine
from fedlightning.config.value_checks import check_values
from fedlightning.trainer import FederatedTrainer

NAN, INF = float("nan"), float("inf")
BASE: dict[str, Any] = {
    "trainer": {
        "max_rounds": 1,
        "logger": False,
        "enable_progress_bar": False,
        "save_state": 0,
        "callbacks": [{"class_path": "fedlightning.callbacks.FedProx", "init_args": {"mu": 0.1}}],
    },
    "model": {
        "class_path": "fedlightning.models.Classifier",
        "init_args": {
            "net": {
                "class_path": "fedlightning.models.MLP",
                "init_args": {"in_features": 64, "hidden": [8], "num_classes": 10},
            },
            "num_classes": 10,
        },
    },
    "data": {
        "class_path": "fedlightning.datamodules.DigitsDataModule",
        "init_args": {
            "partitioner": {"class_path": "fedlightning.datamodules.IIDPartitioner", "init_args": {"num_clients": 3}},
            "batch_size": 64,
        },
    },
}
PLACES = {
    "trainer": ("trainer",),
    "mu": ("trainer", "callbacks", 0, "init_args"),
    "callback": ("trainer", "callbacks", 0),
    "model": ("model", "init_args"),
    "net": ("model", "init_args", "net", "init_args"),
    "data": ("data", "init_args"),
    "partitioner": ("data", "init_args", "partitioner", "init_args"),
}
MUTATIONS: list[tuple[str, str, Any, str]] = [
    ("trainer", "max_rounds", None, "trainer.max_rounds: null is not a value for it; it must be a whole number"),
    ("trainer", "max_rounds", 0, "trainer.max_rounds=0. Use a whole number in [1, inf)"),
    ("trainer", "max_rounds", NAN, "trainer.max_rounds: must be a whole number"),
    ("trainer", "name", None, "trainer.name: null is not a value for it; it must be a text"),
    ("trainer", "default_root_dir", None, "trainer.default_root_dir: null is not a value"),
    ("trainer", "seed", None, "trainer.seed: null is not a value"),
    ("trainer", "seed", -1, "trainer.seed=-1 must be a whole number from 0 to 4294967295"),
    ("trainer", "participation", NAN, "trainer.participation: nan is not a number that it can work with"),
    (
        "trainer",
        "participation",
        1.5,
        "trainer.participation=1.5. Use a whole number in [1, inf), or a number in (0, 1]",
    ),
    ("trainer", "lr_decay", INF, "trainer.lr_decay: inf is not a number"),
    ("trainer", "client_memory_gb", NAN, "trainer.client_memory_gb: nan"),
    ("trainer", "num_nodes", 2, "trainer.num_nodes=2, but this process was not started on several machines"),
    ("trainer", "devices", "text", "trainer.devices='text': no client can train with that"),
    ("trainer", "strategy", "text", "trainer.strategy='text': no client can train with that"),
    ("trainer", "precision", "text", "trainer.precision='text': no client can train with that"),
    ("trainer", "check_val_every_n_epoch", 0, "trainer.check_val_every_n_epoch=0. Use a whole number in [1, inf)"),
    ("trainer", "gradient_clip_val", -1, "trainer.gradient_clip_val=-1.0. Use a number in [0, inf)"),
    (
        "trainer",
        "gradient_clip_algorithm",
        "l3",
        "trainer.gradient_clip_algorithm: must be one of 'norm', 'value'",
    ),
    (
        "trainer",
        "limit_train_batches",
        1.5,
        "trainer.limit_train_batches=1.5. Use a whole number in [0, inf), a number in [0, 1]",
    ),
    ("trainer", "val_check_interval", 0, "trainer.val_check_interval=0. Use a whole number in [1, inf)"),
    ("trainer", "log_every_n_steps", -1, "trainer.log_every_n_steps=-1. Use a whole number in [0, inf)"),
    ("trainer", "evaluation", {"stages": "G"}, "trainer.evaluation.stages: must be a list"),
    (
        "trainer",
        "engine",
        "warp",
        "trainer.engine='warp' is unknown. Choose one of ['sequential', 'processes', 'vectorized'",
    ),
    ("trainer", "precison", 32, "trainer has no option 'precison'. Did you mean precision?"),
    ("mu", "mu", NAN, "trainer.callbacks[0].mu: nan is not a number that it can work with; it must be finite"),
    ("mu", "mu", None, "trainer.callbacks[0].mu: null is not a value for it; it must be a number"),
    ("mu", "mu", -0.1, "trainer.callbacks[0]: FedProx got mu=-0.1"),
    ("mu", "mux", 0.1, "FedProx has no option 'mux' (in trainer.callbacks). Did you mean mu?"),
    ("callback", "class_path", "FedProks", "Did you mean FedProx"),
    ("model", "lr", -0.1, "model: Classifier got lr=-0.1. Use a number in [0, inf), or None."),
    ("model", "lr", NAN, "model.lr: nan is not a number"),
    ("model", "label_smoothing", None, "model.label_smoothing: null is not a value for it; it must be a number"),
    ("net", "hidden", [-3], "model.net: MLP got hidden=[-3]. Use a list, each a whole number in [1, inf)."),
    ("net", "in_features", 0, "model.net: MLP got in_features=0. Use a whole number in [1, inf)."),
    (
        "net",
        "in_features",
        63,
        "Classifier.training_step fails for client '0' on a batch of train data, tried before round 1",
    ),
    ("data", "num_workers", -1, "data: DigitsDataModule got num_workers=-1. Use a whole number in [0, inf)"),
    ("data", "batch_size", None, "data.batch_size: null is not a value for it; it must be a whole number"),
    ("data", "val_fraction", NAN, "data.val_fraction: nan is not a number"),
    ("data", "seed", None, "data.seed: null is not a value"),
    ("partitioner", "num_clients", 0, "IIDPartitioner"),
    ("partitioner", "num_clients", "text", "data.partitioner"),
]


def mutated(place: str, key: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(BASE)
    section: Any = config
    for step in PLACES[place]:
        section = section[step]
    section[key] = value
    return config


def refusal(config: Any, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line that the command prints for a configuration that it refuses."""
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    Path("c.yaml").write_text(text)
    assert main(["fit", "--config", "c.yaml", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Warning")]
    assert len(lines) == 1
    assert not Path("runs").exists()
    return lines[0]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("place", "key", "value", "sentence"),
    [  # every third is in the fast suite: places and kinds of mistakes alternate
        pytest.param(*row, id=f"{row[0]}.{row[1]}={row[2]}", marks=pytest.mark.slow if number % 3 else ())
        for number, row in enumerate(MUTATIONS)
    ],
)
def test_a_mutation_is_refused_in_a_sentence(
    place: str, key: str, value: Any, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(mutated(place, key, value), capsys)


def test_an_option_of_the_last_callback_is_misspelt(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(BASE, capsys, "--trainer.callbacks.mux=0.1")
    assert "FedProx has no option 'mux' (in trainer.callbacks). Did you mean mu?" in said


def test_two_callbacks_that_cannot_wrap_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    config = copy.deepcopy(BASE)
    config["trainer"]["callbacks"] = [
        {"class_path": "fedlightning.callbacks.FedIT"},
        {"class_path": "fedlightning.callbacks.FENDA", "init_args": {"head": "net.fc2"}},
    ]
    assert "another callback has put adapters into it" in refusal(config, capsys)


def test_aliases_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    assert "holds more than 100,000 values" in refusal("\n".join([*lines, "trainer: {callbacks: *i}"]), capsys)
    for endless in ("trainer: &t\n  callbacks: *t\n", "a: &a [*a]\n", "trainer: {callbacks: &a [{b: *a}]}\n"):
        assert "it holds itself by an alias" in refusal(endless, capsys)


def test_a_number_of_a_users_class_may_be_nan(tmp_path: Path) -> None:
    own = {"class_path": "sklearn.impute.SimpleImputer", "init_args": {"missing_values": NAN, "fill_value": INF}}
    check_values({"trainer": {}, "model": own, "data": None}, FederatedTrainer)
    ours = {"class_path": "fedlightning.callbacks.PLayerFL", "init_args": {"threshold": INF}}
    check_values({"trainer": {"callbacks": [ours]}}, FederatedTrainer)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainer: {max_rounds: 010}", "010 in line 1 is another number than it looks"),
        ("trainer: {max_rounds: 1:30}", "1:30 in line 1 is another number"),
        ("trainer: {max_rounds: 1_000}", "1_000 in line 1 is another number"),
        ("trainer: {lr_decay: 1_0.5}", "1_0.5 in line 1 is another number"),
        ("trainer: {lr_decay: 9_0e-2}", "9_0e-2 in line 1 is another number"),
        ("trainer: {lr_decay: .9_5}", ".9_5 in line 1 is another number"),
        ("trainer: {max_rounds: 0x1_0}", "0x1_0 in line 1 is another number"),
        ("trainer: {lr_decay: ０.5}", "０.5 in line 1 is another number"),
        ("trainer: {default_root_dir: '${HOME}/runs'}", "holds ${HOME}, which is not replaced here. Write it out."),
        ("trainer: {default_root_dir: $HOME/runs}", "holds $HOME, which is not"),
        ("trainer: {default_root_dir: '${oc.env:HOME}/runs'}", "holds ${oc.env:HOME}, which is not"),
        ("trainer: {default_root_dir: '$(pwd)/runs'}", "holds $(, which is not"),
        ("trainer: {default_root_dir: ~/runs}", "holds ~, which is not"),
        (
            "trainer: {callbacks: [{class_path: FedProx, init_args: {mu: 0.1}, dict_kwargs: {mu: 0.9}}]}",
            "FedProx has 'mu' in init_args and in dict_kwargs: leave it in init_args",
        ),
    ],
)
def test_what_is_other_than_it_looks_is_refused(text: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.yaml").write_text(text, encoding="utf-8")
    assert sentence in refusal(BASE, capsys, "--config", "other.yaml")


@pytest.mark.parametrize("option", ["--trainer.max_rounds=1_0", "--model.lr=０.1", "--trainer.callbacks.mu=010"])
def test_digits_on_the_command_line_are_plain(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, _, digits = option.removeprefix("--").partition("=")
    assert f"--{name}: {digits} is read as" in refusal(BASE, capsys, option)


def test_names_may_begin_as_a_variable_of_a_shell() -> None:
    data = {"class_path": "fedlightning.datamodules.TabularFederatedDataModule"}
    check_values({"data": data | {"init_args": {"drop": ["$cost", "~", "US$"]}}}, FederatedTrainer)
    with pytest.raises(InputError, match=r"data\.categories\.age\[1\]: '\$HOME' holds \$HOME"):
        check_values({"data": data | {"init_args": {"categories": {"age": ["20", "$HOME"]}}}}, FederatedTrainer)


def test_texts_may_look_like_such_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"version": "1_0", "name": "010", "held_out": ["08", "１", "0:30"]}
    config = BASE | {"trainer": BASE["trainer"] | texts}
    Path("c.yaml").write_text(yaml.safe_dump(config))
    written = CommandLine.run_config(Commands("fit", ["--config", "c.yaml"]))
    assert {name: yaml.safe_load(written)["trainer"][name] for name in texts} == texts
    Path("c.yaml").write_text(written, encoding="utf-8")
    assert CommandLine.run_config(Commands("fit", ["--config", "c.yaml"])) == written
