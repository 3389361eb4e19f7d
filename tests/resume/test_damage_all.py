"""Every file of a run, damaged in every way: going on, testing and reporting give the same numbers, or a sentence."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.algorithm import Facts
from fedlightning.callbacks import SCAFFOLD, GlobalCheckpoint, LocalCheckpoint
from fedlightning.cli import main
from fedlightning.config.input_errors import explain
from tests.experiments.tiny import small
from tests.helpers import Toy, make_trainer, toy_data
from tests.resume.test_resume import equal_trees, everything

pytestmark = pytest.mark.slow


class Stop(FederatedCallback):
    """Interrupts a run before a round."""

    facts = Facts(takes_part=False)

    def __init__(self, round=2):
        self.round = round

    def on_round_start(self, server):
        if server.round == self.round:
            raise KeyboardInterrupt


def at(place):
    """Return a damage: from this share of the file on, it is cut off."""

    def cut(path, older):
        path.write_bytes(path.read_bytes()[: int(place * path.stat().st_size)])

    return cut


def flip(place):
    """Return a damage: one bit, at this share of the file."""

    def change(path, older):
        content = bytearray(path.read_bytes())
        if content:
            content[int(place * (len(content) - 1))] ^= 4
            path.write_bytes(content)

    return change


def folder(path, older):
    path.unlink()
    path.mkdir()


def exchanged(path, older):
    if older.exists():
        shutil.copy(older, path)


DAMAGES = {
    "empty": at(0.0),
    "cut at a third": at(0.33),
    "last bytes lost": at(0.995),
    "first byte": flip(0.0),
    "a byte in the middle": flip(0.5),
    "last byte": flip(1.0),
    "missing": lambda path, older: path.unlink(),
    "a folder": folder,
    "older": exchanged,
    "unreadable": lambda path, older: path.chmod(0),
}


def start(root, *more):
    torch.manual_seed(0)
    callbacks = [SCAFFOLD(), LocalCheckpoint(), GlobalCheckpoint(), *more]
    options = {"max_rounds": 4, "participation": 2, "logger": True, "name": "run", "version": "v"}
    return make_trainer(root, callbacks, **options), Toy("sgd"), toy_data()


def fit(root, *more):
    trainer, module, data = start(root, *more)
    trainer.fit(module, datamodule=data, resume="auto")
    return trainer


def files(run):
    return sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run after two rounds, after three, and whole."""
    root = tmp_path_factory.mktemp("runs")
    for name, stop in {"two": [Stop(2)], "three": [Stop(3)], "whole": []}.items():
        try:
            fit(root / name, *stop)
        except KeyboardInterrupt:
            assert stop
    return root


def sentence(error):
    text = explain(error)
    assert text is not None, f"no sentence: {type(error).__name__}: {error}"
    assert len(text) > 20 and "Traceback" not in text
    return text


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_goes_on_to_the_same_numbers_or_says_why_not(runs, tmp_path, damage):
    if damage == "unreadable" and os.geteuid() == 0:
        pytest.skip("nothing is unreadable to root")
    whole, told = fit(runs / "whole"), {}
    for name in files(runs / "three/run/v"):
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(runs / "three", root)
        DAMAGES[damage](root / "run/v" / name, runs / "two/run/v" / name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                trainer = fit(root)
            except Exception as error:
                told[str(name)] = sentence(error)
                continue
        equal_trees(everything(whole), everything(trainer))
        if trainer.run.path == root / "run/v":
            for same in ("metrics.csv", "logs/metrics.csv"):
                assert (runs / "whole/run/v" / same).read_bytes() == (root / "run/v" / same).read_bytes(), name
    print(damage, told)
    if damage not in ("older", "unreadable"):
        assert any("metrics.csv" in name for name in told)  # something was damaged indeed


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_evaluation_gives_the_same_numbers_or_says_why_not(runs, tmp_path, damage):
    if damage == "unreadable" and os.geteuid() == 0:
        pytest.skip("nothing is unreadable to root")

    def evaluate(root):
        trainer, module, data = start(root)
        trainer.restore(module, data, root / "run/v")
        return trainer.rounds_done, trainer.test()

    shutil.copytree(runs / "whole", tmp_path / "expected")
    expected = evaluate(tmp_path / "expected")[1]
    for name in files(runs / "whole/run/v"):
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(runs / "whole", root)
        DAMAGES[damage](root / "run/v" / name, runs / "three/run/v" / name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                rounds, found = evaluate(root)
            except Exception as error:
                sentence(error)
                continue
        # the state before the newest one is complete, too, and is named as what it is
        assert found == expected or any("is damaged" in str(one.message) for one in caught) or rounds == 3, name


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_report_is_made_or_says_why_not(tmp_path, damage, monkeypatch, capsys):
    if damage == "unreadable" and os.geteuid() == 0:
        pytest.skip("nothing is unreadable to root")
    monkeypatch.chdir(tmp_path)
    config = small(Path("c.yaml"), max_rounds=2, name="run", version="v", logger=True)
    assert main(["fit", "--config", config]) == 0
    whole = Path("runs/run/v")
    for name in files(whole):
        if "checkpoints" in name.parts:
            continue
        shutil.rmtree("other", ignore_errors=True)
        shutil.copytree(whole, "other/run/v")
        DAMAGES[damage](Path("other/run/v") / name, whole / name)
        capsys.readouterr()
        code = main(["report", "other/run/v"])
        text = capsys.readouterr()
        assert code in (0, 2) and "Traceback" not in text.err + text.out, (name, text.err)
