"""A resumed run is the run that was started: what changes its rounds is refused, by name, unless it is allowed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks import SCAFFOLD, FedAvgM, FedProx, GlobalCheckpoint, LocalCheckpoint
from fedlightning.client.data_summary import describe
from fedlightning.options import Evaluation, FailurePolicy, Processes, Seeds, Sequential
from fedlightning.resume.config_changes import ARGUMENTS as FIXED
from fedlightning.resume.config_changes import DETAILS, differences, fingerprint
from fedlightning.storage.files import plain
from fedlightning.testing.toys import ToyData, federate
from tests.helpers import Toy, make_trainer, toy_data


class Net(Toy):
    """A module with options that no hyper-parameter names."""

    def __init__(self, lr=0.1, smoothing=0.0, kind=torch.optim.SGD):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=smoothing)
        self.make = partial(kind, lr=lr)

    def configure_optimizers(self):
        return self.make(self.parameters())


def start(root, callbacks=(), module=None, **options):
    torch.manual_seed(0)
    trainer = make_trainer(root, callbacks or [FedProx()], max_rounds=1, name="run", **options)
    trainer.fit(module or Net(), datamodule=toy_data())


def go_on(root, module=None, callbacks=(), data=None, allow=False, **options):
    trainer = make_trainer(root, callbacks or [FedProx()], **{"max_rounds": 2, "name": "run"} | options)
    trainer.fit(module or Net(), datamodule=data or toy_data(), resume="last", allow_config_change=allow)
    return trainer


CHANGES = {
    "learning rate": ({"module": Net(lr=0.2)}, r"optimizer\.lr was 0\.1 and is 0\.2"),
    "optimizer": ({"module": Net(kind=torch.optim.Adam)}, r"optimizer was 'SGD' and is 'Adam'"),
    "label smoothing": ({"module": Net(smoothing=0.1)}, r"model\.criterion\.label_smoothing was 0\.0 and is 0\.1"),
    "class": ({"module": Toy()}, r"model was '.*Net' and is '.*Toy'"),
    "batch size": ({"data": toy_data(batch_size=4)}, r"data\.batch_size was \d+ and is 4"),
    "an algorithm more": (
        {"callbacks": [FedProx(), FedAvgM()]},
        r"callbacks was \['FedProx'\] and is \['FedProx', 'FedAvgM'\]; FedAvgM\.beta was not there and is 0\.9",
    ),
    "an algorithm less": ({"callbacks": [SCAFFOLD()]}, r"callbacks was \['FedProx'\] and is \['SCAFFOLD'\]"),
    "a Lightning callback": (
        {"callbacks": [FedProx(), GradientAccumulationScheduler({0: 2})]},
        r"callbacks was \['FedProx'\] and is \['FedProx', 'GradientAccumulationScheduler'\]",
    ),
    "who takes part": ({"seed": Seeds(0, participation=4)}, r"seed\.participation was not there and is 4"),
    "validation inside visits": (
        {"check_val_every_n_epoch": 2},
        r"check_val_every_n_epoch was not there and is 2",
    ),
    "arithmetic": ({"engine": "vectorized"}, r"engine was 'one client at a time' and is 'vectorized'"),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    root = tmp_path_factory.mktemp("started")
    start(root)
    return root


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_by_name(started, change):
    given, sentence = CHANGES[change]
    with pytest.raises(ValueError, match=sentence):
        go_on(started, **given)


def test_a_change_that_is_allowed_is_in_the_summary_for_good(tmp_path):
    start(tmp_path)
    with pytest.warns(UserWarning, match=r"goes on with another configuration: optimizer\.lr was 0\.1 and is 0\.2"):
        trainer = go_on(tmp_path, Net(lr=0.2), allow=True)
    expected = ["from round 2: optimizer.lr was 0.1 and is 0.2"]
    assert trainer.summary["config_changes"] == expected
    again = go_on(tmp_path, Net(lr=0.2), max_rounds=3)
    assert json.loads((again.run.path / "summary.json").read_text())["config_changes"] == expected


def test_more_rounds_and_another_place_of_work_are_no_change(tmp_path):
    start(tmp_path)
    assert "config_changes" not in go_on(tmp_path, max_rounds=3, engine=Processes(1)).summary


@pytest.mark.parametrize("changed", [{"evaluation": 2}, {"evaluation": Evaluation(stages=["G", "L1"])}])
def test_where_models_are_chosen_by_scores_the_same_rounds_are_scored(tmp_path, changed):
    for callback in (LocalCheckpoint, GlobalCheckpoint):
        root = tmp_path / callback.__name__
        start(root, [callback()], evaluation=1)
        with pytest.raises(ValueError, match=r"evaluation\.(every was 1|stages was 'G, L1, L2') and"):
            go_on(root, callbacks=[callback()], **{"evaluation": 1} | changed)
        go_on(root, callbacks=[callback()], evaluation=Evaluation(every=1, stages=["L2", "G", "L1"]))
    start(tmp_path / "plain", evaluation=1)
    assert go_on(tmp_path / "plain", **{"evaluation": 1} | changed).rounds_done == 2


def test_of_two_values_of_one_class_the_arguments_that_differ_are_named() -> None:
    def optimizer(name: str, **more: object) -> dict[str, object]:
        return {"model.optimizer": {"class_path": name, "init_args": {"eps": 1e-8, **more}}}

    said = differences(optimizer("SGD", lr=0.1, net={"a": 1, "b": 2}), optimizer("SGD", lr=0.2, net={"a": 1, "b": 3}))
    assert said == ["model.optimizer.lr was 0.1 and is 0.2", "model.optimizer.net.b was 2 and is 3"]
    assert differences(optimizer("SGD"), optimizer("SGD", lr=0.2)) == ["model.optimizer.lr was not there and is 0.2"]
    (other,) = differences(optimizer("SGD"), optimizer("Adam"))
    assert "'SGD'" in other and "'Adam'" in other


def test_other_features_with_the_same_labels_are_seen_where_they_are_in_memory(tmp_path, monkeypatch):
    def changed(change):
        data = toy_data()
        for splits in data.tensors.values():
            splits["train"] = (change(splits["train"][0]), splits["train"][1])
        return data

    with monkeypatch.context() as earlier:
        earlier.setattr("fedlightning.client.data_summary.hash_samples", lambda dataset: None)
        start(tmp_path / "earlier")
    assert go_on(tmp_path / "earlier", data=changed(lambda x: x + 1)).rounds_done == 2  # it did not know
    start(tmp_path)
    for change in (lambda x: x + 1, lambda x: 0.5 * x, lambda x: x.flip(1)):
        with pytest.raises(ValueError, match=r"data \(train samples\) was '\w+' and is '\w+'"):
            go_on(tmp_path, data=changed(change))
    assert go_on(tmp_path, data=changed(lambda x: x * (1 + 1e-7))).rounds_done == 2  # another machine's last bits


def test_another_public_data_set_is_seen_by_what_it_holds(tmp_path):
    def data(value):
        class Data(ToyData):
            def public_dataloader(self):
                return DataLoader(TensorDataset(torch.full((8, 6), value)), batch_size=4)

        return Data((12, 7))

    federate(None, data(0.0), tmp_path, max_rounds=1, save_state=1)
    with pytest.raises(ValueError, match=r"data \(public content\) was '\w+' and is '\w+'"):
        federate(None, data(1.0), tmp_path, max_rounds=2, save_state=1, resume=True)
    federate(None, data(0.0), tmp_path, max_rounds=2, save_state=1, resume=True)


ODD = """
from functools import partial
values = {
    "classes": {(1, 2): "a", 3: "b", None: "c", "d": 1},
    "names": {"x", "y", "z"},
    "nan": float("nan"),
    "function": partial(len),
    "method": [].append,
}
"""


@pytest.mark.slow
def test_values_that_json_cannot_take_are_the_same_in_the_next_process():
    code = ODD + "import json; from fedlightning.storage.files import plain; print(json.dumps(plain(values)))"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    root = Path(__file__).parents[2]
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True, env=environment
    )
    here: dict[str, Any] = {}
    exec(ODD, here)
    assert differences(json.loads(there.stdout), plain(here["values"])) == []


# -- one command for a job that may be requeued ------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, "fixed"])
def test_auto_starts_and_then_goes_on(tmp_path, version):
    def run(rounds):
        trainer = make_trainer(tmp_path, [FedProx()], max_rounds=rounds, name="run", version=version)
        trainer.fit(Net(), datamodule=toy_data(), resume="auto")
        return trainer

    torch.manual_seed(0)
    first, second = run(1), run(3)
    assert second.run.path == first.run.path
    assert second.rounds_done == 3
    assert {row.round for row in second.rows} == {1, 2, 3}


def test_auto_starts_anew_what_was_killed_before_its_first_state(tmp_path):
    killed = make_trainer(tmp_path, [FedProx()], max_rounds=1, name="run", version="fixed", save_state=0)
    killed.fit(Net(), datamodule=toy_data())  # leaves scores and no state
    with pytest.raises(ValueError, match="There is a run in"):
        make_trainer(tmp_path, [FedProx()], name="run", version="fixed").fit(Net(), datamodule=toy_data())
    scores = killed.run.path / "metrics.csv"
    before = scores.read_text()
    with pytest.raises(ValueError, match="There is a run in"):  # it came to its end: its scores are not thrown away
        make_trainer(tmp_path, [FedProx()], name="run", version="fixed").fit(Net(), toy_data(), resume="auto")
    assert scores.read_text() == before
    (killed.run.path / "summary.json").unlink()  # as if it had been killed
    again = make_trainer(tmp_path, [FedProx()], max_rounds=2, name="run", version="fixed")
    again.fit(Net(), datamodule=toy_data(), resume="auto")
    assert [row.round for row in again.rows] == sorted(row.round for row in again.rows)
    assert len({row.address for row in again.rows}) == len(again.rows)


class Scheduled(Toy):
    """A module whose learning rate is scheduled."""

    def __init__(self, gamma=0.5, milestones=(4, 8)):
        super().__init__()
        self.make = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=list(milestones), gamma=gamma)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": self.make(optimizer), "interval": "step"}]


class Noise(Callback):
    """A Lightning callback with an option."""

    def __init__(self, size):
        self.size = size


def frozen():
    module = Toy()
    next(module.parameters()).requires_grad_(False)
    return module


def ready():
    data = toy_data()
    data.setup()
    return data


def one_smaller_batch():
    data, made = ready(), type(toy_data()).client_dataloader

    def loader(client, split):
        found = made(data, client, split)
        if split == "train" and client == data.client_ids[-1]:
            return DataLoader(found.dataset, batch_size=2, sampler=found.sampler)
        return found

    data.client_dataloader = loader
    return data


ARGUMENTS = dict.fromkeys(FIXED) | {
    "seed": Seeds(),
    "engine": Sequential(),
    "evaluation": Evaluation(),
    "failures": FailurePolicy(),
}
SEEN = {
    "a scheduler's option": (
        {"model": Scheduled()},
        {"model": Scheduled(gamma=0.9)},
        r"scheduler\.gamma was 0\.5 and is 0\.9",
    ),
    "a scheduler's times": (
        {"model": Scheduled()},
        {"model": Scheduled(milestones=(4,))},
        r"scheduler\.milestones\.8 was 1 and is not there",
    ),
    "a Lightning callback's option": (
        {"ordinary": [Noise(0.1)]},
        {"ordinary": [Noise(0.5)]},
        r"Noise\.size was 0\.1 and is 0\.5",
    ),
    "a frozen parameter": ({}, {"model": frozen()}, r"model's frozen parameters was '0 .*' and is '1 .*'"),
    "batches of the last client": ({}, {"data": one_smaller_batch()}, r"data\.batch_size was \d+ and is '.*2.*'"),
    "a plugin's precision": (
        {},
        {"arguments": ARGUMENTS | {"plugins": [MixedPrecision("bf16-mixed", "cpu")]}},
        r"precision was None and is 'bf16-mixed'",
    ),
    "the precision of the plugin that has the last word": (
        {},
        {
            "arguments": ARGUMENTS
            | {"plugins": [MixedPrecision("16-mixed", "cpu"), MixedPrecision("bf16-mixed", "cpu")]}
        },
        r"precision was None and is 'bf16-mixed'",
    ),
    "the precision of a plugin alone": (
        {},
        {"arguments": ARGUMENTS | {"plugins": MixedPrecision("bf16-mixed", "cpu")}},
        r"precision was None and is 'bf16-mixed'",
    ),
    "validation after some steps": (
        {},
        {"arguments": ARGUMENTS | {"val_check_interval": 2}},
        r"val_check_interval was not there and is 2",
    ),
    "machines that share batches": (
        {},
        {"arguments": ARGUMENTS | {"num_nodes": 2}},
        r"num_nodes was not there and is 2",
    ),
    "a strategy's precision": (
        {},
        {"arguments": ARGUMENTS | {"strategy": SingleDeviceStrategy(precision_plugin=DoublePrecision())}},
        r"precision was None and is '64-true'",
    ),
    "devices that share batches": (
        {},
        {"arguments": ARGUMENTS | {"devices": [0, 1]}},
        r"devices was not there and is 2",
    ),
    "validation": ({}, {"arguments": ARGUMENTS | {"limit_val_batches": 1}}, r"limit_val_batches was None and is 1"),
}


@pytest.mark.parametrize("case", SEEN)
def test_a_fingerprint_tells(case):
    """Options that Lightning's own objects keep, and the last client's batches, change what a round computes."""
    before, now, sentence = SEEN[case]
    usual = {"arguments": ARGUMENTS, "callbacks": [], "ordinary": [], "model": Toy(), "data": ready()}
    given = [usual | changed for changed in (before, now)]
    old, new = (plain(fingerprint(**one | {"data": describe(one["data"], details=DETAILS)})) for one in given)
    found = differences(json.loads(json.dumps(old)), new)
    assert any(re.fullmatch(sentence, text) for text in found), found


def test_one_device_in_other_words_is_no_change():
    """Nor is a strategy that says nothing of the precision."""
    for arguments in ({"devices": "auto"}, {"devices": [1]}, {"devices": "1"}, {"strategy": SingleDeviceStrategy()}):
        usual = {"callbacks": [], "ordinary": [], "model": Toy(), "data": describe(ready(), details=DETAILS)}
        assert fingerprint(ARGUMENTS | arguments, **usual) == fingerprint(ARGUMENTS, **usual)
