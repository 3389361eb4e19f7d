"""SampleDP beside SecureAggregation: the run without masks, its epsilon, and what is counted where masking fails."""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from fedlightning.algorithm import FederatedCallback, Wire
from fedlightning.callbacks import FedAvg, FedPer, FedProto, SampleDP, SecureAggregation
from fedlightning.callbacks.shared import masking
from fedlightning.callbacks.shared.fixed_point import FixedPoint
from fedlightning.engines.attempts import FederationError
from fedlightning.options import Processes
from tests.callbacks.test_secure_aggregation import Fails
from tests.helpers import Toy, close, federate, global_state, make_trainer, same, toy_data

THERE = find_spec("cryptography") is not None and find_spec("opacus") is not None
pytestmark = [
    pytest.mark.skipif(not THERE, reason="pip install opacus cryptography"),
    pytest.mark.filterwarnings("ignore"),
]
SIZES = {"0": 16, "1": 24, "2": 16, "3": 32}


def dp(**options):
    return SampleDP(**{"delta": 1e-3, "noise_multiplier": 1.0} | options)


def run(callbacks, root=None, **options):
    torch.manual_seed(0)
    return federate(Toy(), toy_data(SIZES), callbacks, root, **{"max_rounds": 1} | options)


def told(trainer):
    return json.loads((trainer.run.path / "privacy.json").read_text())


@pytest.mark.parametrize("method", [FedAvg, FedPer])
@pytest.mark.parametrize("order", [1, -1])
def test_it_is_the_run_without_masks_and_spends_the_same(method, order, tmp_path):
    plain = run([method(), dp(noise_seed=3)], tmp_path / "plain", local_epochs=2)
    masked = run([method(), dp(noise_seed=3), SecureAggregation()][::order], tmp_path / "masked", local_epochs=2)
    close(global_state(masked), global_state(plain), atol=3e-7)
    one, other = (
        {client: trainer.store.get(client).state["SampleDP"]["history"] for client in SIZES}
        for trainer in (plain, masked)
    )
    assert one == other and all(one.values())
    assert plain.server.state["SampleDP"] == masked.server.state["SampleDP"]


def test_the_run_tells_both_promises(tmp_path):
    said = told(run([dp(), SecureAggregation()], tmp_path, max_rounds=2))
    assert said["private"] and "all but the client" in said["against"] and said["epsilon"] > 0
    assert "keeps to the protocol" in said["also"][0]
    alone = told(run([dp()], tmp_path / "alone", max_rounds=2))
    assert said["epsilon_by_client"] == alone["epsilon_by_client"] and alone["also"] == []


@pytest.mark.parametrize("step", ["training", "masking", "open"])
def test_a_visit_whose_update_never_arrives_is_spent(step, tmp_path, monkeypatch):
    """A client that trained and could not mask, or that sent masked integers and was gone at the end."""
    add_own_masks = masking.add_own_masks

    def failing(total, kept, me):
        if me == "2":
            raise RuntimeError("no power")
        add_own_masks(total, kept, me)

    if step == "masking":
        monkeypatch.setattr(masking, "add_own_masks", failing)
    ledger = tmp_path / "ledger"
    callbacks = [dp(ledger=str(ledger)), SecureAggregation()]
    gone = [] if step == "masking" else [Fails(c2=step)]
    trainer = run([*callbacks, *gone], tmp_path)
    counted = {
        client: sum(
            int(steps[-1])
            for history in json.loads((ledger / f"{client}.json").read_text())["runs"].values()
            for steps in history
        )
        for client in SIZES
    }
    expected = run([dp(ledger=str(tmp_path / "other"))], tmp_path / "all")
    assert counted == {client: int(expected.store.get(client).state["SampleDP"]["history"][0][-1]) for client in SIZES}
    assert len(trainer.server.failures) == 1


def test_a_resumed_run_gives_the_same_bits_and_tells_the_same(tmp_path):
    """The secrets of the masks are others in every run; those of the noise are kept."""
    whole = run([dp(noise_seed=3), SecureAggregation()], tmp_path / "whole", max_rounds=2)
    cut = make_trainer(tmp_path, [dp(noise_seed=3), SecureAggregation()], max_rounds=1, name="cut")
    torch.manual_seed(0)
    cut.fit(Toy(), datamodule=toy_data(SIZES))
    again = make_trainer(tmp_path, [dp(noise_seed=3), SecureAggregation()], max_rounds=2, name="cut")
    torch.manual_seed(0)
    again.fit(Toy(), datamodule=toy_data(SIZES), resume="last")
    assert told(again)["in_the_clear"] == told(whole)["in_the_clear"] != []
    assert again.summary["leaves"] == whole.summary["leaves"] != []
    same(global_state(again), global_state(whole))


def test_a_round_that_ends_before_the_sum_is_opened_is_done_again_with_the_same_noise(tmp_path, monkeypatch):
    """Killed between mask and unmask: other masks, the same noisy updates, and each visit is counted once."""
    ledger, encoded, encode, counts = tmp_path / "ledger", [], FixedPoint.encode, []

    def seen(point, parts, share):
        integers = encode(point, parts, share)
        encoded.append(integers.copy())  # masks are added in place
        return integers

    def failing(kept, me, there):
        raise RuntimeError("no power")

    monkeypatch.setattr(FixedPoint, "encode", seen)
    for rounds, fails in ((1, False), (2, True), (2, False)):
        trainer = make_trainer(tmp_path, [dp(ledger=str(ledger)), SecureAggregation()], max_rounds=rounds, name="cut")
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(masking, "reveal", failing)
            with pytest.raises(FederationError, match="no power") if fails else nullcontext():
                trainer.fit(Toy(), datamodule=toy_data(SIZES), resume="last" if rounds == 2 else None)
        counts.append({path.name: json.loads(path.read_text()) for path in ledger.glob("*.json")})
    assert all(np.array_equal(one, other) for one, other in zip(encoded[4:8], encoded[8:], strict=True))
    assert counts[1] == counts[2] and len(counts[0]["3.json"]["runs"]) == 1 and len(counts[2]["3.json"]["runs"]) == 2


@pytest.mark.slow
def test_workers_give_the_same_bits():
    alone, two = (
        run([dp(noise_seed=3), SecureAggregation()], max_rounds=2, **options)
        for options in ({}, {"engine": Processes(2)})
    )
    same(global_state(alone), global_state(two))


class Hint(FederatedCallback):
    """Sends clients a number that training may depend on, and notes at which address each draws batches and noise."""

    def __init__(self, number):
        self.number, self.drawn = number, {}

    def wire(self, module):
        return Wire(down={"number": "scalar"})

    def on_broadcast(self, server, job, message):
        message.extras[self.key] = {"number": torch.tensor(self.number)}

    def on_send(self, client, update):
        if client.message.work != 0:
            self.drawn[client.id] = client.scratch["SampleDP"]


class Longer(FederatedCallback):
    """Asks for two epochs."""

    def plan_round(self, server):
        yield [server.job(client, work=2) for client in server.participants()]


def test_what_training_may_depend_on_gives_other_batches_and_noise_and_masks_do_not():
    """Two releases of one noise would give a gradient away: other work and other messages have other addresses."""
    found = []
    for hint, beside in (
        (Hint(1.0), []),
        (Hint(1.0), [SecureAggregation()]),
        (Hint(2.0), []),
        (Hint(1.0), [Longer()]),
    ):
        run([hint, dp(noise_seed=3), *beside])
        found.append(hint.drawn)
    plain, masked, *others = found
    assert plain == masked and set(plain) == set(SIZES)
    assert all(len({one[client] for one in (plain, *others)}) == 3 for client in SIZES)


def test_means_by_class_do_not_travel_in_a_sum():
    with pytest.raises(ValueError, match="FedProto"):
        run([FedProto(), dp(), SecureAggregation()])
