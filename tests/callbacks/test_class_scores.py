"""F1 scores by class, and groups of clients by them: sheet B 1.8.6."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import f1_score

from fedlightning.callbacks import FedAvg
from fedlightning.callbacks.shared.contributions import class_scores, groups_by_class_scores
from tests.helpers import CLASSES, Toy, federate, toy_data


def test_scores_are_f1_by_class_and_0_without_samples():
    data = toy_data([24, 40], val=20)
    x, y = data.tensors["0"]["val"]
    data.tensors["0"]["val"] = (x[y != 1], y[y != 1])  # no sample of class 1
    found = {}

    class Looks(FedAvg):
        def on_send(self, client, update):
            found[client.id] = (
                class_scores(client, "net.3", "Looks"),
                {k: v.clone() for k, v in client.module.state_dict().items()},
            )

    federate(Toy(lr=0.5), data, [Looks()], max_rounds=1, local_epochs=3)
    for client, (scores, state) in found.items():
        net = Toy().eval()
        net.load_state_dict(state)
        inputs, labels = data.tensors[client]["val"]
        expected = f1_score(labels, net(inputs).argmax(-1), labels=range(CLASSES), average=None, zero_division=0)
        assert scores.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert found["0"][0][1] == 0 and max(found["0"][0]) > 0


def groups(rows, count=2, seed=0):
    return groups_by_class_scores({str(i): torch.tensor(row) for i, row in enumerate(rows)}, count, seed)


def test_only_classes_that_vary_decide():
    """Classes 2 to 5 differ a little, together more than the noise between groups on 0 and 1 would allow."""
    noise = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 0.2
    rows = torch.cat([torch.tensor([[0.9, 0.1], [0.1, 0.9]] * 3), 0.5 + noise], 1)
    found = groups(rows.tolist())
    assert found["0"] == found["2"] == found["4"] != found["1"] == found["3"] == found["5"]


def test_there_are_never_fewer_classes_than_groups():
    """One class has all the variance above the mean; three groups need a second one to be told apart."""
    rows = [[0.0, 0.0, 0.5], [0.0, 0.4, 0.5], [0.01, 0.0, 0.5], [0.01, 0.4, 0.5], [1.0, 0.0, 0.5], [0.99, 0.01, 0.5]]
    found = groups(rows, 3)
    assert found["0"] == found["2"] != found["1"] == found["3"] and found["4"] == found["5"]
    assert len(set(found.values())) == 3


def test_fewer_clients_than_groups_are_dealt():
    assert groups([[0.1, 0.9], [0.1, 0.9]], 3) == {"0": 0, "1": 1}
    assert groups([], 2) == {}
