"""What is asked of a fitted federation: tables, scores from a folder, checkpoints, newest metrics, representations."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

import fedlightning
from fedlightning.callbacks import FedAvg, FedPer
from fedlightning.options import Evaluation
from fedlightning.tensors import module_state
from tests.helpers import Toy, federate, make_trainer, same, toy_data


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    module, data = Toy(), toy_data([16, 24])
    root = tmp_path_factory.mktemp("runs")
    return module, data, federate(module, data, [FedAvg("uniform")], root=root, max_rounds=2)


def test_the_table_is_printed_unless_one_is_quiet(fitted, capsys):
    module, data, trainer = fitted
    rows = trainer.test()
    shown = capsys.readouterr().out
    assert "Results on test data" in shown and "Each client on its own test data" in shown
    assert trainer.test(verbose=False) == rows and trainer.test("latest", verbose=False) == rows
    assert trainer.test(module, data, ckpt_path="latest", verbose=False) == rows
    assert capsys.readouterr().out == ""
    trainer.validate()
    assert "Results on validation data" in capsys.readouterr().out


def test_a_run_is_scored_from_its_folder(fitted):
    module, data, trainer = fitted
    rows = trainer.test(verbose=False)
    other = make_trainer(trainer.run.path.parents[1], [FedAvg("uniform")], max_rounds=2)
    assert other.test(model=module, datamodule=data, run=trainer.run.path, verbose=False) == rows
    assert other.test(module, data, ckpt_path=trainer.run.path, verbose=False) == rows


def test_scores_of_something_else_are_refused(fitted):
    _, data, trainer = fitted
    with pytest.raises(ValueError, match="not fitted with this model"):
        trainer.test(Toy(), data)
    with pytest.raises(ValueError, match="not fitted with this datamodule"):
        trainer.validate(datamodule=toy_data([16, 24]))
    with pytest.raises(ValueError, match="give the model and the datamodule"):
        trainer.test(run=trainer.run.path)
    with pytest.raises(RuntimeError, match="no federation yet"):
        make_trainer(None).test()


def test_a_checkpoint_can_be_loaded(fitted, tmp_path):
    _, _, trainer = fitted
    for client in (None, "1"):
        path = tmp_path / "deep" / f"{client}.ckpt"
        trainer.save_checkpoint(path, client)
        same(module_state(Toy.load_from_checkpoint(path)), module_state(trainer.module(client)))
        same(module_state(fedlightning.load(path, trust=["tests"])), module_state(trainer.module(client)))
    personal = federate(Toy(), toy_data([16, 24]), [FedPer()], max_rounds=1)
    with pytest.raises(ValueError, match="no global model"):
        personal.save_checkpoint(tmp_path / "none.ckpt")
    assert not (tmp_path / "none.ckpt").exists()


def test_the_newest_means(fitted):
    _, _, trainer = fitted
    values = [r.value for r in trainer.rows if (r.round, r.stage, r.data, r.metric) == (2, "L1", "local", "val_loss")]
    found = trainer.callback_metrics
    assert len(values) == 2 and found["val_loss"].item() == pytest.approx(sum(values) / 2)
    assert all(isinstance(value, torch.Tensor) for value in found.values())
    assert make_trainer(None).callback_metrics == {} and make_trainer(None).client_ids == []
    assert trainer.client_ids == ["0", "1"]


def test_representations(fitted):
    _, data, trainer = fitted
    assert repr(trainer).endswith("callbacks=[FedAvg(weighting='uniform')]): 2 rounds done, 2 clients>")
    assert "max_rounds=2" in repr(trainer) and "seed" not in repr(trainer)
    assert repr(make_trainer(None)).endswith(": not fitted>")
    page = trainer._repr_html_()
    assert "<caption>FederatedTrainer: 2 rounds done, 2 clients</caption>" in page and "<th>val_loss</th>" in page
    assert f"<td>{trainer.run.path}</td>" in page and "[FedAvg(weighting=&#x27;uniform&#x27;)]" in page
    assert "val_loss" not in make_trainer(None)._repr_html_()
    assert repr(trainer.server) == "<Server of Toy, 2 clients, round 2 of 2, [FedAvg(weighting='uniform')]>"
    assert repr(data) == str(data) == "<ToyData: 2 clients, 40 training samples>"
    assert repr(toy_data([8])) == "<ToyData: not set up>"


def test_what_was_refused_is_not_scored(fitted, tmp_path):
    module, data, trainer = fitted
    folder = tmp_path / "run"
    shutil.copytree(trainer.run.path, folder)
    before = (folder / "summary.json").read_text()
    other = make_trainer(tmp_path, [FedAvg("uniform")], max_rounds=3, participation=0.5)
    timed = make_trainer(tmp_path, evaluation=Evaluation(seconds=3.0))
    refusals = (
        (other, lambda: other.fit(module, data, resume=folder), "participation was 1.0 and is 0.5"),
        (other, lambda: other.restore(Toy(hidden=9), data, folder), "holds a different model"),
        (timed, lambda: timed.fit(module, data), "has no clock"),
    )
    for asked, refused, sentence in refusals:
        with pytest.raises(ValueError, match=sentence):
            refused()
        with pytest.raises(RuntimeError, match="no federation yet"):
            asked.test(verbose=False)
    assert other.rounds_done == 0 and (folder / "summary.json").read_text() == before


def test_clients_may_be_named_by_numbers(fitted, tmp_path):
    _, _, trainer = fitted
    for number in (1, np.int64(1)):
        same(module_state(trainer.module(number)), module_state(trainer.module("1")))
        same(module_state(trainer.client(number).module), module_state(trainer.module("1")))
        assert torch.equal(trainer.predict(client=number)[0], trainer.predict(client="1")[0])
        trainer.save_checkpoint(tmp_path / "a.ckpt", number)
        assert torch.load(tmp_path / "a.ckpt", weights_only=False)["fedlightning"]["client"] == "1"
    with pytest.raises(ValueError, match="There is no client '7'"):
        trainer.module(7)
