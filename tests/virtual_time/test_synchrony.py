"""Which algorithms run where updates arrive one by one."""

from __future__ import annotations

from fedlightning.virtual_time.asynchronous import refuse_synchronous
from tests.conformance.case import collect

RUN = {
    "APFL",
    "Ditto",
    "FENDA",
    "FLDE",
    "FFALoRA",
    "FML",
    "FedAsync",
    "FedAvg",
    "FedSALoRA",
    "FedAvgM",
    "FedAdam",
    "FedYogi",
    "FedAdagrad",
    "FedBN",
    "FedBuff",
    "FedIT",
    "FedLC",
    "FedLP",
    "FedMultimodal",
    "FedNTD",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSAM",
    "FedSGD",
    "FedType",
    "GPFL",
    "LGFedAvg",
    "Local",
    "MAPPER",
    "MOON",
    "PerFCL",
    "PerFedAvg",
    "pFedBayes",
}
"""What has nothing at the server that counts on synchronous rounds. A name that comes or goes here was looked at."""


def test_every_method_is_run_or_refused_by_name():
    first = {name.partition(" ")[0]: case.algorithm for name, case in collect("CASES").items()}
    ran = set()
    for name, callback in first.items():
        try:
            refuse_synchronous(callback)
            ran.add(name)
        except ValueError as refusal:
            assert str(refusal).startswith(f"{callback.key} ")
        assert not (callback.claims("plan_round") and name in ran)
    assert ran == RUN
