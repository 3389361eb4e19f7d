"""What is going to be run: labels, stacks, baselines, what varies, what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlightning.commands.study_options import parse_seeds, split_words
from fedlightning.config.input_errors import InputError
from fedlightning.experiments.children import Outcome, call
from fedlightning.experiments.experiment import StudyFile
from fedlightning.experiments.methods import (
    AUTO,
    Method,
    algorithms_of,
    baseline_config,
    differences,
    labels,
    missing_baselines,
    split_label,
)
from fedlightning.experiments.plan import make_plan
from tests.experiments.tiny import CALLBACKS, HERE, is_the_same_library, request, small


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(*callbacks: str) -> dict:
    paths = [name if "." in name else f"{CALLBACKS}.{name}" for name in callbacks]
    return {
        "trainer": {"callbacks": [{"class_path": path, "init_args": {}} for path in paths]},
        "model": {},
        "data": {},
    }


# -- words and labels --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "seeds"), [("5", [0, 1, 2, 3, 4]), ("0,3,7", [0, 3, 7]), ("3,", [3]), ("2, 2,1", [2, 1]), ("1", [0])]
)
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1,b", "2.5"])
def test_seeds_that_are_none(text):
    with pytest.raises(InputError, match=r"--seeds is .*give a number of seeds"):
        parse_seeds(text)


def test_options_of_a_run_are_told_from_the_commands_own():
    words = "a.yaml --trainer.max_rounds 3 b.yaml --data.root=x --seeds 2 --model.lr=1 --trainer.callbacks+=My --data X"
    own, passed = split_words(words.split())
    assert own == ["a.yaml", "b.yaml", "--seeds", "2"]
    assert " ".join(passed) == "--trainer.max_rounds 3 --data.root=x --model.lr=1 --trainer.callbacks+=My --data X"


def test_labels():
    assert split_label("mine=a/b.yaml") == ("mine", "a/b.yaml")
    assert split_label("a=1/b.yaml") == ("a", "1/b.yaml")
    assert split_label("runs/a=1/b.yaml") == (None, "runs/a=1/b.yaml")
    assert labels([None, "x y", None], ["a.yaml", "b.yaml", "c.d.yaml"]) == ["a", "x-y", "c.d"]
    assert labels([None, None], ["mnist/a.yaml", "digits/A.yaml"]) == ["mnist-a", "digits-A"]
    assert labels([None, None], ["m/a.yaml", "./m/a.yaml"]) == ["m-a", "m-a_2"]
    assert len({name.lower() for name in labels([None, "a", None], ["a.yaml", "b.yaml", "A.yaml"])}) == 3
    with pytest.raises(ValueError, match="'a' is given twice"):
        labels(["a", "A"], ["x", "y"])


# -- baselines ---------------------------------------------------------------------------------------------------------
def test_algorithms_among_callbacks():
    names = (
        "LocalCheckpoint", "GlobalCheckpoint", "Sensitivity", "lightning.pytorch.callbacks.LearningRateMonitor",
        f"{HERE}.MyCheckpoint", "FedAvg",
    )  # fmt: skip
    assert algorithms_of(config(*names)) == set()
    assert algorithms_of(config("fedlightning.callbacks.fenda.FENDA", "FedProx")) == {"FENDA", "FedProx"}
    assert algorithms_of(config(f"{HERE}.MyAlgorithm")) == {f"{HERE}.MyAlgorithm"}


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ([["FENDA"]], ["Local", "Central", "FedAvg", "LocalAdaptation"]),
        ([["LocalCheckpoint"]], ["Local", "Central", "LocalAdaptation"]),
        ([["FedProx"], ["FedAvg", "GlobalCheckpoint"], ["Central"]], ["Local", "LocalAdaptation"]),
        ([["FedAvg", "FedProx"]], ["Local", "Central", "FedAvg", "LocalAdaptation"]),
        ([["Local"], ["Central"], ["FedAvg"], ["FedAvg", "LocalAdaptation"]], []),
    ],
)
def test_baselines_that_are_missing(given, added):
    assert missing_baselines([config(*callbacks) for callbacks in given], AUTO) == added


def test_a_baseline_keeps_checkpoints_and_ordinary_callbacks():
    ordinary = "lightning.pytorch.callbacks.LearningRateMonitor"
    first = config("LocalCheckpoint", "GlobalCheckpoint", ordinary, f"{HERE}.MyAlgorithm", "FedProx")
    first["trainer"]["max_rounds"] = 7

    def names(algorithm):
        made = baseline_config(first, algorithm)
        assert made["trainer"]["max_rounds"] == 7
        return [item["class_path"].rpartition(".")[2] for item in made["trainer"]["callbacks"]]

    assert names("Central") == ["LocalCheckpoint", "GlobalCheckpoint", "LearningRateMonitor", "Central"]
    assert names("Local") == ["LocalCheckpoint", "LearningRateMonitor", "Local"]  # without a global model
    assert len(first["trainer"]["callbacks"]) == 5


# -- plans -------------------------------------------------------------------------------------------------------------
def test_files_options_and_seeds_are_stacked_in_order(tmp_path):
    first, second = small(tmp_path / "a.yaml", "FedProx"), small(tmp_path / "b.yaml", max_rounds=3)
    (tmp_path / "under.yaml").write_text("trainer: {max_rounds: 9, local_epochs: 4, lr_decay: 0.5}")
    (tmp_path / "over.yaml").write_text("trainer: {local_epochs: 6}\ndata: {init_args: {batch_size: 8}}")
    plan = make_plan(
        request(
            [first, f"mine={second}"],
            before=["under.yaml"],
            after=["over.yaml"],
            options=["--data.batch_size=4"],
            baselines=["Local"],
        )
    )
    assert [(method.name, method.baseline) for method in plan.methods] == [
        ("a", False),
        ("mine", False),
        ("local", True),
    ]
    assert [method.rounds for method in plan.methods] == [1, 3, 1]
    for method in plan.methods:
        trainer = method.config["trainer"]
        assert (trainer["lr_decay"], trainer["local_epochs"], len(method.clients)) == (0.5, 6, 3)
        assert method.config["data"]["init_args"]["batch_size"] == 4
        assert trainer["evaluation"]["test_data"] == ["local", "pooled", "clients"]
        assert method.vary == ["trainer.seed", "data.init_args.val_seed"]
    assert [item["class_path"] for item in plan.methods[2].config["trainer"]["callbacks"]] == [
        f"{CALLBACKS}.LocalCheckpoint",
        f"{CALLBACKS}.Local",
    ]
    assert plan.methods[0].configs == ["under.yaml", first, "over.yaml"]


def test_a_callback_may_stand_alone_and_without_a_list(tmp_path):
    plan = make_plan(request([small(tmp_path / "a.yaml")], options=["--trainer.callbacks=FedProto"], baselines=[]))
    assert plan.methods[0].config["trainer"]["callbacks"]["class_path"] == f"{CALLBACKS}.FedProto"
    assert "shares prototypes and no model" in plan.methods[0].no_model


def test_the_matrix_is_for_few_clients_and_never_over_the_users_word(tmp_path):
    file = small(tmp_path / "a.yaml")
    many = make_plan(request([file], options=["--data.partitioner.num_clients=21"], baselines=[])).methods[0]
    assert len(many.clients) == 21
    assert many.config["trainer"]["evaluation"]["test_data"] is None
    own = make_plan(request([file], options=["--trainer.evaluation.test_data=[local]"], baselines=[])).methods[0]
    assert own.config["trainer"]["evaluation"]["test_data"] == ["local"]


def test_what_varies_can_be_chosen(tmp_path):
    plan = make_plan(request([small(tmp_path / "a.yaml")], vary=["data.init_args.seed"], baselines=[]))
    assert plan.methods[0].vary == ["trainer.seed", "data.init_args.seed"]
    with pytest.raises(InputError, match=r"a \(.*a.yaml\): .*no option.*sed'"):
        make_plan(request([small(tmp_path / "a.yaml")], vary=["data.init_args.sed"], baselines=[]))


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (
            "trainer: {max_round: 3}",
            r"third \(.*a.yaml \+ third.yaml\): trainer has no option 'max_round'. Did you mean max_rounds",
        ),
        pytest.param("trainer: {max_rounds: 0}", "third .*max_rounds=0.*whole number", marks=pytest.mark.slow),
        pytest.param(
            "data: {class_path: MNISTDataModule, init_args: {root: nowhere}}",
            "third .*MNISTDataModule did not find",
            marks=pytest.mark.slow,
        ),
        ("data: {init_args: {partitioner: {init_args: {num_clients: 5000}}}}", "third .*cannot give 5000 clients"),
        pytest.param(
            "model: {class_path: fedlightning.models.Clasifier}",
            "third .*no class.*Did you mean Classifier",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_wrong_in_the_third_file_is_found_before_anything_runs(tmp_path, broken, sentence):
    file = small(tmp_path / "a.yaml")
    (tmp_path / "third.yaml").write_text(broken)
    with pytest.raises(InputError, match=sentence):
        make_plan(request([f"one={file}", f"two={file}", "third.yaml"], before=[file], baselines=[]))


def test_unknown_baselines_and_files(tmp_path):
    file = small(tmp_path / "a.yaml")
    with pytest.raises(InputError, match=r"--baselines: There is no algorithm 'Locl'. Did you mean Local"):
        make_plan(request([file], baselines=["Locl"]))
    with pytest.raises(InputError, match=r"nope.*does not exist"):
        make_plan(request([file, "nope.yaml"]))


def test_a_fingerprint_is_of_what_decides_the_numbers():
    def fingerprint(seed=0, vary=("trainer.seed",), **trainer):
        return Method("m", [], {"trainer": {"lr": 1} | trainer, "model": {}, "data": {}}, vary).fingerprint(seed)

    assert fingerprint() == fingerprint(name="x", version="v", default_root_dir="d", enable_progress_bar=False)
    others = [
        fingerprint(lr=2),
        fingerprint(seed=1),
        fingerprint(vary=("trainer.seed", "data.seed")),
        fingerprint(b=None),
    ]
    assert len({fingerprint(), *others}) == 5


def test_differences_name_the_keys():
    old, new = config("FedProx"), config("FedProx")
    new["trainer"]["callbacks"][0]["init_args"] = {"mu": 0.5}
    new["trainer"]["name"] = "elsewhere"
    new["model"] = {"lr": 2}
    said = differences(old, new)
    assert "trainer.callbacks.0.init_args.mu is 0.5, was not there" in said
    assert "model.lr is 2, was not there" in said
    assert not any("name" in sentence for sentence in said)
    assert differences(new, new) == []


# -- what a study holds already ----------------------------------------------------------------------------------------
def method(**trainer):
    return Method("m", ["m.yaml"], {"trainer": {"max_rounds": 1} | trainer, "model": {}, "data": {}})


def make(study, made, seeds, redo=None, error=None):
    """Plan, begin and pretend to run; the seeds that were run."""
    tasks = study.plan([made], seeds, redo)
    study.begin([made], seeds, tasks, redo)
    for task in tasks:
        task.folder.mkdir(parents=True, exist_ok=True)
        (task.folder / "metrics.csv").write_text("round\n1\n")
        (task.folder / "summary.json").write_text("{}")
        study.ended(task, Outcome(error, 1.0))
    return [task.seed for task in tasks]


def test_all_files_that_cannot_run_are_named_at_once(here):
    small(here / "a.yaml")
    for name in "bc":
        (here / f"{name}.yaml").write_text((here / "a.yaml").read_text().replace("max_rounds", f"{name}_rounds"))
    with pytest.raises(InputError) as found:
        make_plan(request(["a.yaml", "b.yaml", "c.yaml"], baselines=[]))
    said = str(found.value)
    assert said.startswith("2 of 3 methods cannot run:") and "1. b (" in said and "2. c (" in said


def test_a_study_grows_and_keeps_what_it_has(tmp_path):
    assert make(StudyFile(tmp_path), method(), [0, 1]) == [0, 1]
    assert make(StudyFile(tmp_path), method(), [0, 1, 2]) == [2]
    assert make(StudyFile(tmp_path), method(), [1]) == []
    assert [run["seed"] for run in StudyFile(tmp_path).data["runs"]] == [0, 1, 2]
    with pytest.raises(
        InputError, match=r"seed_1 holds a run of another configuration \(trainer.lr is 2, was not there\)"
    ):
        StudyFile(tmp_path).plan([method(lr=2)], [1], None)
    assert make(StudyFile(tmp_path), method(lr=2), [1], redo="all") == [1]
    (tmp_path / "runs/m/seed_1/summary.json").unlink()  # somebody cleaned up
    assert make(StudyFile(tmp_path), method(lr=2), [1]) == [1]


def test_failed_runs_are_made_again_when_asked_for_or_mended(tmp_path):
    assert make(StudyFile(tmp_path), method(lr=9), [0], error="It broke.") == [0]
    assert StudyFile(tmp_path).entry("m", 0)["error"] == "It broke."
    assert make(StudyFile(tmp_path), method(lr=9), [0]) == []
    assert make(StudyFile(tmp_path), method(lr=9), [0], redo="failed", error="Again.") == [0]
    assert make(StudyFile(tmp_path), method(lr=1), [0]) == [0]  # another configuration of a run that had failed
    assert StudyFile(tmp_path).entry("m", 0)["state"] == "done"


def test_a_run_that_the_study_does_not_know_is_not_touched(tmp_path):
    (tmp_path / "runs/m/seed_0").mkdir(parents=True)
    (tmp_path / "runs/m/seed_0/metrics.csv").write_text("round\n")
    with pytest.raises(InputError, match=r"holds a run that study.json does not know. Choose another --out"):
        StudyFile(tmp_path).plan([method()], [0], None)


def test_plans_read_modules_of_pytorch_lightning_as_runs_do():
    pytest.importorskip("pytorch_lightning.core.module")
    assert call(is_the_same_library)
