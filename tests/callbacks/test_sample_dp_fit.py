"""What SampleDP asks of a fit: its steps, its address, its patients."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedlightning.callbacks import SampleDP
from fedlightning.callbacks.sample_dp_checks import patients_of, planned_steps
from fedlightning.callbacks.shared.secret_noise import digest_of
from fedlightning.client.client import Client
from fedlightning.client.record import ClientRecord
from fedlightning.contract import CallbackList
from fedlightning.contract.messages import Message


def fit(**options):
    return SimpleNamespace(**{"num_training_batches": 4, "global_step": 0, "max_steps": -1, "max_epochs": 3} | options)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 12),
        ({"global_step": 5}, 7),
        ({"max_steps": 6}, 6),
        ({"max_steps": 6, "global_step": 8}, 0),
        ({"num_training_batches": 2}, 6),
    ],
)
def test_steps_are_those_of_the_limit_that_ends_the_fit(options, steps):
    assert planned_steps(fit(**options), range(4)) == steps


@pytest.mark.parametrize("epochs", [None, -1])
def test_a_fit_without_an_end_is_refused(epochs):
    with pytest.raises(ValueError, match="max_epochs or max_steps"):
        planned_steps(fit(max_epochs=epochs), range(4))


def test_any_bit_of_what_came_is_in_the_address_and_the_order_of_names_is_not():
    w = torch.arange(6.0).reshape(2, 3)
    came = [{"b": w, "a": [1, None]}, "tag"]
    assert digest_of(came) == digest_of([{"a": [1, None], "b": w.T.contiguous().T}, "tag"])
    bit = w.clone()
    bit.view(torch.int32)[1, 2] ^= 1
    others = [[{"b": bit, "a": [1, None]}, "tag"], [{"b": w, "c": [1, None]}, "tag"], [{"b": w, "a": [2, None]}, "tag"]]
    assert len({digest_of(one) for one in [came, *others]}) == 4


def test_patients_are_known_of_every_sample_or_refused():
    names = np.array(["a", "b", "a"], dtype=object)
    assert patients_of(SimpleNamespace(id="0", sample_groups=names)) is names
    with pytest.raises(ValueError, match="knows no groups"):
        patients_of(SimpleNamespace(id="0", sample_groups=None))
    with pytest.raises(ValueError, match="Of 2 training samples of client '0' nobody knows whose"):
        patients_of(SimpleNamespace(id="0", sample_groups=np.array(["a", None, float("nan")], dtype=object)))


def test_a_visit_is_addressed_by_all_that_it_starts_from():
    """Two branches of a record with equal counts are two visits, whoever keeps what differs."""
    dp = SampleDP(delta=1e-3, noise_multiplier=1.0, noise_seed=0)

    def address(momentum=0.0, control=0.0, came=0.0):
        own = {"SampleDP": {"secret": "s", "history": [[1.0, 0.5, 4]]}, "FedDyn": {"gradient": torch.tensor([control])}}
        optimizer = {"state": {0: {"momentum_buffer": torch.tensor([momentum])}}, "param_groups": [{"lr": 0.1}]}
        record = ClientRecord(state=own, lightning={"fit": {"checkpoint": {"optimizer_states": [optimizer]}}})
        runner = SimpleNamespace(callbacks=CallbackList([dp]))
        kept = Client.training_state.fget(SimpleNamespace(record=record, _runner=runner))
        client = SimpleNamespace(
            id="a",
            visit=1,
            state=own,
            training_state=kept,
            scratch={},
            training_extras={},
            is_at_site=False,
            withhold_data=lambda text: None,
            entries={"w": torch.tensor([came])},
            message=Message(1, "a", {}, ()),
        )
        dp.on_visit_start(client)
        return client.scratch["SampleDP"]

    assert address() == address()
    assert len({address(), address(momentum=1.0), address(control=1.0), address(came=1.0)}) == 4
