"""A run that is interrupted and goes on leaves the loggers that an uninterrupted one leaves: every round once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from fedlightning import FederatedCallback
from fedlightning.algorithm import Facts
from fedlightning.callbacks import LocalAdaptation
from fedlightning.cli import main
from fedlightning.errors import ConfigurationError
from fedlightning.resume.loggers import BEGINNING, ROUND, LoggerStates
from fedlightning.scores.rows import Row
from tests.experiments.tiny import small
from tests.helpers import Toy, make_trainer, toy_data
from tests.resume.trackers import MLFlowServer, WandbServer

ROUNDS = 4


class Stop(FederatedCallback):
    """The process ends in the middle of a round, or between its scores and its state."""

    facts = Facts(takes_part=False)

    def __init__(self, round=0, inside=True):
        self.round, self.inside = round, inside

    def on_round_start(self, server):
        if self.inside and server.round == self.round:
            raise KeyboardInterrupt

    def on_round_end(self, server):
        if not self.inside and server.round == self.round:
            raise KeyboardInterrupt


def run(root, loggers, *more, resume="auto", rounds=ROUNDS, **options):
    torch.manual_seed(0)
    options = {"name": "run", "version": "v", "logger": loggers} | options
    trainer = make_trainer(root, more, max_rounds=rounds, **options)
    trainer.fit(Toy("sgd"), datamodule=toy_data(), resume=resume)
    return trainer


def cut(root, loggers, *stops, **options):
    """Interrupt a run at several rounds, each process with loggers of its own, then finish it."""
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            run(root, loggers(root), stop, **options)
    return run(root, loggers(root), **options)


def events(folder):
    """Step, name and value of every event, read from all files as they are."""
    loaded = [event for path in sorted(folder.glob("*tfevents*")) for event in EventFileLoader(str(path)).Load()]
    return sorted((e.step, v.tag, v.tensor.float_val[0]) for e in loaded for v in e.summary.value)


def both(root):
    return [CSVLogger(root / "logs", "csv"), TensorBoardLogger(root / "logs", "tb", prefix="p"), CSVLogger(root, "b")]


STOPS = {
    "in_round_1": [Stop(0)],
    "before_state_1": [Stop(0, inside=False)],
    "twice": [Stop(1), Stop(2, inside=False)],
    "at_the_end": [Stop(3, inside=False)],
}


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"evaluation": 3}, marks=pytest.mark.slow), {"save_state": 2}], ids=str
)
@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.fast_cases(2)
def test_files_are_those_of_an_uninterrupted_run(tmp_path, stops, options):
    run(tmp_path / "whole", both(tmp_path / "whole"), **options)
    cut(tmp_path / "cut", both, *STOPS[stops], **options)
    for place in ("logs/csv", "b"):
        found = [(tmp_path / side / place / "version_0/metrics.csv").read_bytes() for side in ("whole", "cut")]
        assert found[0] == found[1] and found[0].count(b"\n") == ROUNDS + 1
    whole, ours = (events(tmp_path / side / "logs/tb/version_0") for side in ("whole", "cut"))
    assert whole == ours and {name[:2] for _, name, _ in ours} == {"p-"}
    assert sorted(path.name for path in (tmp_path / "cut/logs").rglob("version_*")) == ["version_0"] * 2
    assert not list(tmp_path.rglob(BEGINNING))


@pytest.mark.parametrize("resume", ["auto", "last", "path"])
@pytest.mark.fast_cases(1)
def test_the_default_logger(tmp_path, resume):
    run(tmp_path / "whole", True)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", True, Stop(2, inside=False))
    folder = tmp_path / "cut/run/v"
    run(tmp_path / "cut", True, resume=folder if resume == "path" else resume)
    found = [(tmp_path / side / "run/v/logs/metrics.csv").read_bytes() for side in ("whole", "cut")]
    assert found[0] == found[1]
    assert [path.name for path in folder.glob("logs*")] == ["logs"]


def test_a_run_that_was_moved(tmp_path):
    run(tmp_path / "whole", True)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", True, Stop(2))
    (tmp_path / "cut").rename(tmp_path / "elsewhere")
    run(tmp_path / "elsewhere", True)
    found = [(tmp_path / side / "run/v/logs/metrics.csv").read_bytes() for side in ("whole", "elsewhere")]
    assert found[0] == found[1]


def test_the_same_objects_go_on(tmp_path):
    run(tmp_path / "whole", both(tmp_path / "whole"))
    ours = both(tmp_path / "cut")
    for stop in (Stop(1), Stop(2, inside=False)):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", ours, stop)
    run(tmp_path / "cut", ours)
    found = [(tmp_path / side / "b/version_0/metrics.csv").read_bytes() for side in ("whole", "cut")]
    assert found[0] == found[1]
    assert events(tmp_path / "whole/logs/tb/version_0") == events(tmp_path / "cut/logs/tb/version_0")


class Own(FederatedCallback):
    """Logs with steps of its own."""

    facts = Facts(takes_part=False)

    def __init__(self, loggers):
        self.loggers = loggers

    def on_round_end(self, server):
        for logger in self.loggers:
            for step in range(3):
                logger.log_metrics({"own": step / 3}, step=1000 * server.round + step)


def test_what_a_callback_logs_is_there_once_too(tmp_path):
    for side, stops in {"whole": [], "cut": [Stop(1), Stop(2, inside=False)]}.items():
        for stop in [*stops, None]:
            loggers = both(tmp_path / side)
            try:
                run(tmp_path / side, loggers, Own(loggers), *([stop] if stop else []), evaluation=2)
            except KeyboardInterrupt:
                assert stop is not None
    found = [(tmp_path / side / "logs/csv/version_0/metrics.csv").read_bytes() for side in ("whole", "cut")]
    assert found[0] == found[1] and found[0].count(b"\n") == 1 + ROUNDS + 3 * ROUNDS
    assert events(tmp_path / "whole/logs/tb/version_0") == events(tmp_path / "cut/logs/tb/version_0")


def test_a_lost_or_damaged_log_is_filled_up(tmp_path):
    run(tmp_path / "whole", both(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", both(tmp_path / "cut"), Stop(3))
    (tmp_path / "cut/b/version_0/metrics.csv").unlink()
    half = tmp_path / "cut/logs/csv/version_0/metrics.csv"
    half.write_bytes(half.read_bytes()[:-20])
    (tensors,) = (tmp_path / "cut/logs/tb/version_0").glob("*tfevents*")
    tensors.write_bytes(tensors.read_bytes()[:-20])
    run(tmp_path / "cut", both(tmp_path / "cut"))
    for place in ("logs/csv", "b"):
        found = [(tmp_path / side / place / "version_0/metrics.csv").read_bytes() for side in ("whole", "cut")]
        assert found[0] == found[1]
    assert events(tmp_path / "whole/logs/tb/version_0") == events(tmp_path / "cut/logs/tb/version_0")


def test_a_new_logger_gets_the_rounds_before(tmp_path):
    run(tmp_path / "whole", [CSVLogger(tmp_path / "whole", "a")])
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", False, Stop(2))
    run(tmp_path / "cut", [CSVLogger(tmp_path / "cut", "a")])
    found = [(tmp_path / side / "a/version_0/metrics.csv").read_bytes() for side in ("whole", "cut")]
    assert found[0] == found[1]


def test_a_version_of_the_users_choice_is_another_place(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [CSVLogger(tmp_path, "a")], Stop(2))
    before = (tmp_path / "a/version_0/metrics.csv").read_bytes()
    run(tmp_path, [CSVLogger(tmp_path, "a", version="new")])
    assert (tmp_path / "a/new/metrics.csv").read_bytes().count(b"\n") == ROUNDS + 1
    assert (tmp_path / "a/version_0/metrics.csv").read_bytes() == before


def test_a_state_of_an_earlier_version(tmp_path):
    """It has no marks, and its rows may go further than it does."""
    run(tmp_path / "whole", True)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", True, Stop(2, inside=False))
    manifest = tmp_path / "cut/run/v/checkpoints/last/manifest.json"
    state = json.loads(manifest.read_text())
    del state["extra"]["loggers"]
    manifest.write_text(json.dumps(state))
    run(tmp_path / "cut", True)
    found = [(tmp_path / side / "run/v/logs/metrics.csv").read_bytes() for side in ("whole", "cut")]
    assert found[0] == found[1]


def test_more_rounds_after_the_visits_that_ended_the_run(tmp_path):
    """Their scores give way to those of the round that takes their place."""

    def of(root, rounds):
        return run(root, both(root), LocalAdaptation(), rounds=rounds)

    of(tmp_path / "whole", 4)
    of(tmp_path / "cut", 2)
    of(tmp_path / "cut", 4)
    found = [(tmp_path / side / "b/version_0/metrics.csv").read_bytes() for side in ("whole", "cut")]
    assert found[0] == found[1]
    assert events(tmp_path / "whole/logs/tb/version_0") == events(tmp_path / "cut/logs/tb/version_0")


@pytest.mark.slow
def test_from_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loggers = [
        {"class_path": f"lightning.pytorch.loggers.{kind}", "init_args": {"save_dir": "logs", "name": kind}}
        for kind in ("CSVLogger", "TensorBoardLogger")
    ]
    for name, stop in {"whole": [], "cut": ["tests.resume.test_loggers.Stop"]}.items():
        config = Path(small(tmp_path / f"{name}.yaml", max_rounds=3, name=name, version="v", logger=loggers))
        words = ["fit", "--config", str(config), "--resume", "auto", f"--trainer.logger.init_args.name={name}"]
        given = yaml.safe_load(config.read_text())
        for logger in given["trainer"]["logger"]:
            logger["init_args"]["name"] += name
        config.write_text(yaml.safe_dump(given))
        words.pop()
        if stop:
            given["trainer"]["callbacks"].append({"class_path": stop[0], "init_args": {"round": 1, "inside": False}})
            (tmp_path / "stop.yaml").write_text(yaml.safe_dump(given))
            assert main(["fit", "--config", "stop.yaml", "--resume", "auto"]) == 130
        assert main(words) == 0
    found = [(tmp_path / f"logs/CSVLogger{side}/version_0/metrics.csv").read_bytes() for side in ("whole", "cut")]
    assert found[0] == found[1]
    ours = [events(tmp_path / f"logs/TensorBoardLogger{side}/version_0") for side in ("whole", "cut")]
    assert ours[0] == ours[1] != []


# -- servers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"save_state": 2}], ids=str)
@pytest.mark.parametrize("given", [{}, pytest.param({"id": "mine"}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("stops", STOPS)
def test_a_run_of_wandb_goes_on(tmp_path, monkeypatch, stops, given, options):
    server = WandbServer(monkeypatch)
    cut(tmp_path, lambda root: [WandbLogger(prefix="p", **given)], *STOPS[stops], **options)
    ((id, ours),) = server.runs.items()
    assert [row["trainer/global_step"] for row in ours.history] == [1, 2, 3, 4]
    assert [row[f"p-{ROUND}"] for row in ours.history] == [1, 2, 3, 4]
    assert all("p-val/G/local/val_loss" in row for row in ours.history)
    assert server.asked[1:] == [("mine", "allow") if given else (id, "must")] * len(STOPS[stops])


def test_rows_that_wandb_has_not_got_are_sent_again(tmp_path, monkeypatch):
    """What a killed process had not sent yet."""
    server = WandbServer(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [WandbLogger()], Stop(3))
    (ours,) = server.runs.values()
    del ours.history[1:]
    ours.summary = dict(ours.history[0])
    run(tmp_path, [WandbLogger()])
    assert [row["trainer/global_step"] for row in ours.history] == [1, 2, 3, 4]


def test_a_run_that_wandb_does_not_have_any_more(tmp_path, monkeypatch):
    server = WandbServer(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [WandbLogger()], Stop(3))
    server.runs.clear()
    with pytest.raises(ConfigurationError, match=r"WandbLogger cannot go on .* \(run0\): run run0 does not exist"):
        run(tmp_path, [WandbLogger()])
    run(tmp_path, [WandbLogger(id="new")])
    assert [row["trainer/global_step"] for row in server.runs["new"].history] == [1, 2, 3, 4]


@pytest.mark.parametrize("options", [{}, {"save_state": 2}], ids=str)
@pytest.mark.parametrize("stops", STOPS)
def test_a_run_of_mlflow_goes_on(tmp_path, monkeypatch, stops, options):
    server = MLFlowServer(monkeypatch)
    cut(tmp_path, lambda root: [MLFlowLogger(prefix="p")], *STOPS[stops], **options)
    ((id, metrics),) = server.runs.items()
    steps = [(metric.key, metric.step) for metric in metrics]
    assert len(steps) == len(set(steps)) and {step for _, step in steps} == {1, 2, 3, 4}
    assert [step for key, step in steps if key == "p-val/G/local/val_loss"] == [1, 2, 3, 4]
    assert server.status[id] == "FINISHED"


class Unknown(Logger):
    """Somebody's logger."""

    kept: dict = {}

    def __init__(self, version):
        super().__init__()
        self.buffer, self._version = [], version

    name = "unknown"

    @property
    def version(self):
        return self._version

    def log_metrics(self, metrics, step=None):
        self.buffer.append(step)

    def log_hyperparams(self, *args, **kwargs):
        pass

    def save(self):
        self.kept.setdefault(self._version, []).extend(self.buffer)
        self.buffer.clear()


def test_a_logger_that_nobody_knows(tmp_path, monkeypatch):
    """What it held when the state was saved is not sent again to the same version; another version gets everything."""
    monkeypatch.setattr(Unknown, "kept", {})
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [Unknown("a"), Unknown("b")], Stop(2))
    run(tmp_path, [Unknown("a"), Unknown("c")])
    assert Unknown.kept == {"a": [1, 2, 3, 4], "b": [1, 2], "c": [1, 2, 3, 4]}


def test_models_of_one_stage_have_values_of_their_own():
    logger = Unknown("a")
    logger.log_metrics = lambda metrics, step: logger.buffer.append(metrics)
    LoggerStates([logger]).log(
        [Row(1, "L2", m, "latest", "local", "val", "0", "loss", v, 1) for m, v in (("global", 1.0), ("k", 2.0))]
    )
    assert Unknown.kept.pop("a") == [{"val/L2/local/loss": 1.0, "val/L2/local/loss/k": 2.0}]


def test_loggers_get_the_models_as_they_stand():
    logger = Unknown("a")
    logger.log_metrics = lambda metrics, step: logger.buffer.append(metrics)
    LoggerStates([logger]).log(
        [
            Row(1, "L1", "personal", "latest", "local", "val", "0", "loss", 1.0, 1),
            Row(1, "L1", "personal", "best_local", "local", "val", "0", "loss", 2.0, 1),
            Row(1, "G", "global", "best_global", "local", "val", "0", "loss", 3.0, 1),
            Row(1, "L1", "personal", "latest", "local", "test", "0", "loss", 4.0, 1),
        ]
    )
    assert Unknown.kept.pop("a") == [{"val/L1/local/loss": 1.0}]
