"""Values of the trainer's arguments: short forms, ranges, what takes the place of old keys, and how files stack."""

import pickle

import numpy as np
import pytest
import yaml

from fedlightning import FederatedTrainer
from fedlightning.commands.run import Commands
from fedlightning.config.input_errors import explain
from fedlightning.config.short_forms import engine_of
from fedlightning.errors import ConfigurationError
from fedlightning.options import (
    Auto,
    EngineOptions,
    Evaluation,
    FailurePolicy,
    Flower,
    Processes,
    Ray,
    Seeds,
    Sequential,
    Vectorized,
)
from fedlightning.options.replaced import REPLACED
from fedlightning.storage.files import config_hash

MODEL = [
    "--model=Classifier",
    "--model.net=LogisticRegression",
    "--model.net.in_features=64",
    "--model.net.num_classes=10",
]
WORDS = [*MODEL, "--model.num_classes=10", "--data=DigitsDataModule"]


def arguments_of(*words):
    return Commands("fit", [*words, *WORDS]).trainer.arguments


def test_short_forms_are_the_values():
    short = FederatedTrainer(engine="processes", failures="retry", evaluation=5, seed=3).arguments
    whole = {"engine": Processes(), "failures": FailurePolicy("retry"), "evaluation": Evaluation(5), "seed": Seeds(3)}
    assert {name: short[name] for name in whole} == whole
    names = ("sequential", "processes", "vectorized", "ray", "flower", "auto")
    kinds = [type(FederatedTrainer(engine=name).arguments["engine"]) for name in names]
    assert kinds == [Sequential, Processes, Vectorized, Ray, Flower, Auto]


def test_equal_values_are_equal_whatever_their_form():
    assert Evaluation(stages=["G"], seconds=5) == Evaluation(stages=("G",), seconds=5.0)
    assert FailurePolicy(timeout=3) == FailurePolicy(timeout=3.0)
    assert Evaluation(clients=1) != Evaluation(clients=0.5)
    assert Evaluation(data=["local", "local"], stages=np.array(["G", "G"])) == Evaluation(stages=["G"])  # scored once
    assert repr(Evaluation(every=2, test_data=[])) == "Evaluation(every=2, test_data=())"
    assert pickle.loads(pickle.dumps(Ray(2, num_gpus=0.5))) == Ray(2, num_gpus=0.5)


def test_the_trainer_shows_what_differs():
    text = repr(FederatedTrainer(engine=Processes(2), failures=FailurePolicy("retry", retries=3)))
    assert "engine=Processes(workers=2), failures=FailurePolicy(on_error='retry', retries=3), callbacks" in text
    assert "engine" not in repr(FederatedTrainer(engine="sequential", evaluation=1, failures=FailurePolicy()))
    assert "min_clients=1.0)" in repr(FederatedTrainer(failures=FailurePolicy(min_clients=1.0)))  # all of them, not one
    assert "participation=1," in repr(FederatedTrainer(participation=1))
    assert config_hash(FailurePolicy(min_clients=1.0)) != config_hash(FailurePolicy())


def test_an_engine_that_there_is_not_is_none():
    for engine in (EngineOptions(), type("Cluster", (EngineOptions,), {})(), Processes, None):
        with pytest.raises(ConfigurationError, match=r"^engine=.* is unknown\. Choose one of"):
            FederatedTrainer(engine=engine)
    with pytest.raises(Exception, match=r"is unknown\. Choose one of"):
        arguments_of("--trainer.engine=fedlightning.options.EngineOptions")


REFUSED = [
    (Evaluation, {"every": -1}, r"every=-1\. Use a whole number in \[0, inf\)"),
    (Evaluation, {"seconds": 1.0, "every": 2}, "both seconds=1.0 and every=2: both say when"),
    (Evaluation, {"seconds": 0.0}, r"seconds=0.0\. Use a number in \(0, inf\)"),
    (Evaluation, {"clients": 1.5}, "clients=1.5. Use .* A float is a share"),
    (Evaluation, {"stages": "G"}, "stages='G'. Use a list, each 'G', 'L1' or 'L2'"),
    (Evaluation, {"stages": ["G", "L3"]}, r"stages=\['G', 'L3'\]"),
    (Evaluation, {"data": ["global"]}, r"data=\['global'\]. Use a list, each 'local' or 'pooled'"),
    (FailurePolicy, {"on_error": "ignore"}, "on_error='ignore'. Use 'skip', 'retry' or 'stop'"),
    (FailurePolicy, {"retries": 2}, "retries=2 without on_error='retry'"),
    (FailurePolicy, {"on_error": "retry", "retries": 0}, "retries=0"),
    (FailurePolicy, {"min_clients": True}, "min_clients=True"),
    (FailurePolicy, {"min_clients": 1.5}, "min_clients=1.5"),
    (FailurePolicy, {"timeout": float("nan")}, "timeout=nan.* It must be finite"),
    (FailurePolicy, {"update_limit": 1}, r"update_limit=1\. Use a number in \(1, inf\), or None"),
    (Seeds, {"run": True}, "run=True. Use a whole number"),
    (Seeds, {"participation": 1.5}, "participation=1.5. Use a whole number, or None"),
    (Processes, {"workers": 0}, "workers=0"),
    (Vectorized, {"clients_per_stack": 1.0}, "clients_per_stack=1.0"),
    (Ray, {"num_cpus": 0}, "num_cpus=0. Use a number .* Fractions such as 0.5"),
    (Ray, {"num_gpus": 1.5}, "num_gpus=1.5: it takes fractions below 1 only"),
    (Ray, {"address": "ray://a:1"}, "Start the run on a machine of the cluster"),
    (Ray, {"address": ""}, "Use 'auto' or 'HOST:PORT'"),
    (Ray, {"init": {"address": "auto"}}, "which is not passed on. Use address"),
    (Ray, {"init": 3}, "Use a dict of arguments of ray.init"),
]


@pytest.mark.parametrize(("kind", "given", "sentence"), REFUSED)
def test_what_is_out_of_range(kind, given, sentence):
    with pytest.raises(ConfigurationError, match=f"^{kind.__name__} got .*{sentence}"):
        kind(**given)


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_an_old_key_gets_a_sentence_that_names_the_new_one(name):
    with pytest.raises(ConfigurationError, match=f"^FederatedTrainer has no argument '{name}'. Use ") as error:
        FederatedTrainer(**{name: 3})
    assert REPLACED[name] in str(error.value)
    with pytest.raises(Exception, match=name) as error:
        arguments_of(f"--trainer.{name}=3")
    assert explain(error.value) == f"there is no option '--trainer.{name}'. Use {REPLACED[name]}."


def test_words_and_files_stack_key_by_key(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(
        "trainer: {engine: processes, failures: {min_clients: 2}, evaluation: {stages: [G], every: 3}, "
        "seed: {participation: 4}}"
    )
    second.write_text(
        "trainer: {engine: {class_path: processes, init_args: {workers: 3}}, failures: retry, evaluation: 5, seed: 7}"
    )
    words = ["--config", str(first), "--config", str(second), "--trainer.failures.retries=4"]
    found = arguments_of(*words)
    assert found["engine"] == Processes(3)
    assert found["failures"] == FailurePolicy("retry", retries=4, min_clients=2)
    assert found["evaluation"] == Evaluation(5, stages=["G"])
    assert found["seed"] == Seeds(7, participation=4)
    assert arguments_of(*words, "--trainer.engine", "auto", "--trainer.evaluation", "7")["engine"] == Auto()


def test_the_configuration_of_a_run_makes_it_again(tmp_path):
    given = [
        "--trainer.engine=ray",
        "--trainer.engine.num_gpus=0.5",
        "--trainer.failures=stop",
        "--trainer.evaluation=0",
        "--trainer.seed=5",
        "--trainer.seed.initialisation=6",
    ]
    cli = Commands("fit", [*given, *WORDS])
    path = tmp_path / "config.yaml"
    path.write_text(cli.run_config())
    trainer = yaml.safe_load(path.read_text())["trainer"]
    assert engine_of(trainer) is Ray and trainer["evaluation"]["every"] == 0
    again = Commands("fit", ["--config", str(path)]).trainer.arguments
    for name in ("engine", "failures", "evaluation", "seed"):
        assert again[name] == cli.trainer.arguments[name]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trainer.engine=warp"], "trainer.engine='warp' is unknown. Choose one of ['sequential',"),
        (["--trainer.engine.workers=4"], "Sequential has no option 'workers'"),
        (["--trainer.evaluation=-1"], "trainer.evaluation: Evaluation got every=-1. Use a whole number"),
        (["--trainer.evaluation.evry=1"], "Did you mean every?"),
        (["--trainer.failures.timeout=-3"], "trainer.failures: FailurePolicy got timeout=-3.0"),
        (["--trainer.evaluation=null"], "trainer.evaluation: "),
        (["--trainer.seed.order=1"], "Seeds has no option 'order' (in trainer.seed)"),
        (["--trainer.seed=-1"], "trainer.seed=-1 must be a whole number from 0"),
        (["--trainer.seed.participation=-1"], "trainer.seed.participation=-1 must be a whole number from 0"),
    ],
)
def test_a_word_that_cannot_be_is_told_with_its_place(words, sentence):
    with pytest.raises(Exception) as error:
        arguments_of(*words)
    assert sentence in explain(error.value)
