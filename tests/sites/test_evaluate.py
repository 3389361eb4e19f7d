"""A given model at sites: scored by the requests of every run, without training, and the same as with all data here."""

from __future__ import annotations

import pytest
import torch

from fedlightning import FederatedTrainer
from fedlightning.options import Evaluation, FailurePolicy
from fedlightning.sites.engine import DataElsewhere
from fedlightning.sites.link import connected
from tests.sites.helpers import RUN, Line, on_clock_of, sites, tasks_in, without_pickle
from tests.tasks import ToyData, ToyModule

OPTIONS = RUN | {"evaluation": Evaluation(test_data=["local"])}


def scores(results):
    return {(row["stage"], row["metric"]): row["per_client"] for row in results if row["data"] == "local"}


def evaluated(root, data, least, **more):
    torch.manual_seed(0)
    trainer = FederatedTrainer(logger=False, enable_progress_bar=False, default_root_dir=root, **OPTIONS | more)
    return trainer, scores(trainer.evaluate(ToyModule(), data, split="val", least=least))


def test_sites_score_a_model_that_they_did_not_train(tmp_path):
    line = Line(sites(tmp_path / "sites"))
    asked = []
    line.watch = lambda node, data: asked.extend(type(task).__name__ for task in tasks_in(data)) or data
    with connected(line, False, False), on_clock_of(line), without_pickle():
        policy = FailurePolicy(timeout=30.0)
        trainer, found = evaluated(tmp_path / "server", DataElsewhere(), 1, engine="flower", failures=policy)
    _, here = evaluated(tmp_path / "here", ToyData(), 1)
    assert found == here and all(found.values())
    assert "Visit" not in asked and "ScoreModel" in asked
    assert trainer.summary["rounds"] == 0


def test_clients_below_the_floor_are_not_asked(tmp_path):
    data = ToyData()
    data.setup("fit")
    sizes = {client: data.num_samples(client, "val") for client in data.client_ids}
    least = max(sizes.values())
    _, found = evaluated(tmp_path, ToyData(), least)
    assert {client for of in found.values() for client in of} == {c for c, n in sizes.items() if n >= least}
    with pytest.raises(ValueError, match="No client has 10000 val samples"):
        evaluated(tmp_path, ToyData(), 10000)
