"""What ClientDP refuses or warns of before round 1."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedlightning.callbacks import ClientDP
from fedlightning.callbacks.client_dp_checks import refuse_other_options, refuse_uncovered
from tests.helpers import Toy, make_trainer, toy_data


def test_rounds_with_another_noise_are_refused():
    refuse_other_options([1.0, 0.5, None], [1.0, 0.5, None])
    with pytest.raises(ValueError, match=r"they were \[1.0, 0.5, None\], and are \[1.0, 0.9, None\] now"):
        refuse_other_options([1.0, 0.5, None], [1.0, 0.9, None])


def setup(net, kinds=None, clients=200):
    names = list(net.state_dict())
    said = []
    found = {"shared_names": lambda: names, "kinds": dict.fromkeys(names, "trainable") | (kinds or {}), "module": net}
    return SimpleNamespace(**found, run=SimpleNamespace(clients=range(clients)), warn=said.append, said=said)


def test_entries_that_are_neither_bounded_nor_covered():
    refuse_uncovered(setup(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="'bias' is a running statistic that travels"):
        refuse_uncovered(setup(nn.Linear(2, 2), {"bias": "float_buffer"}))
    with pytest.raises(ValueError, match=r"'weight' is torch\.bfloat16"):
        refuse_uncovered(setup(nn.Linear(2, 2).to(torch.bfloat16)))
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="is one tensor under several names"):
        refuse_uncovered(setup(tied))


@pytest.mark.parametrize(("clients", "delta", "count"), [(200, 1e-3, 0), (50, 1e-3, 0), (50, 0.02, 1), (200, 0.005, 1)])
def test_a_large_delta_is_told(clients, delta, count):
    asked = setup(nn.Linear(2, 2), clients=clients)
    ClientDP(delta=delta, noise_multiplier=1.0).warn_of_few(asked, clients, "clients")
    assert len(asked.said) == count


def test_few_clients_are_told_that_noise_drowns_them(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[ClientDP(delta=1e-3, noise_multiplier=1.0)], max_rounds=1)
    with pytest.warns(UserWarning, match="ClientDP hides one of 3 clients: the noise"):
        trainer.fit(Toy(), toy_data())
