"""A head is given by one name or by a list, everywhere alike."""

from __future__ import annotations

import pytest

import fedlightning.callbacks as c
from fedlightning.tensors import module_state
from tests.helpers import NormNet, Toy, federate, same, toy_data

TAKE_NAMES = {
    "FENDA": lambda names: c.FENDA(head=names),
    "FedBABU": lambda names: c.FedBABU(head=names, epochs=1),
    "FedIT": lambda names: c.FedIT(r=2, head=names),
    "FedPer": lambda names: c.FedPer(personal=names),
    "FedProto": lambda names: c.FedProto(head=names, predictor="nearest"),
    "FedRep": lambda names: c.FedRep(personal=names, head_epochs=1),
    "LGFedAvg": lambda names: c.LGFedAvg(shared=names),
    "LocalAdaptation": lambda names: c.LocalAdaptation(part="head", head=names),
    "MOON": lambda names: c.MOON(head=names),
    "PerFCL": lambda names: c.PerFCL(head=names),
}


@pytest.mark.parametrize("make", TAKE_NAMES.values(), ids=TAKE_NAMES)
def test_one_name_is_a_list_of_one(make):
    module, data = NormNet(), toy_data((8, 16))
    runs = [federate(module, data, [make(names)], local_steps=1) for names in ("net.3", ["net.3"])]
    for client in ("0", "1"):
        same(*(module_state(run.module(client)) for run in runs))


@pytest.mark.parametrize("make", [TAKE_NAMES[name] for name in ("FENDA", "FedProto", "MOON", "PerFCL")])
def test_features_go_into_one_submodule(make):
    with pytest.raises(ValueError, match=r"head=\['net.0', 'net.3'\] names 2 submodules.*Name a single submodule"):
        federate(Toy(), toy_data((8,)), [make(["net.0", "net.3"])])
