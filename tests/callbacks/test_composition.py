"""Callbacks compose, or say at start why they cannot."""

from __future__ import annotations

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.algorithm import Change, Facts, Need, Wire
from fedlightning.callbacks import (
    APFL,
    FENDA,
    FLIU,
    SCAFFOLD,
    Central,
    FedAdam,
    FedAvg,
    FedBN,
    FedPer,
    FedProx,
    GlobalCheckpoint,
    Local,
    LocalCheckpoint,
    PLayerFL,
    PLayerFLRandom,
)
from fedlightning.tensors import distance, module_state, select
from tests.helpers import NormNet, Toy, close, differs, federate, global_state, mean_of, same, spied, toy_data

SIZES = {"0": 24, "1": 40, "2": 16}
BODY, HEAD = {"net.0.weight", "net.0.bias"}, {"net.3.weight", "net.3.bias"}
NORM = {f"net.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def keys(callbacks):
    return " and ".join(callback.key for callback in callbacks)


def trainable(names):
    return {name for name in names if "running" not in name and "tracked" not in name}


# -- together ----------------------------------------------------------------------------------------------------------

TOGETHER = {
    "FENDA": (lambda: [FENDA("net.3"), FedProx(), FedAdam()], BODY | NORM),
    "FedPer": (lambda: [FedPer(), FedProx(), FedAdam()], BODY | NORM),
    "FedBN": (lambda: [FedBN(), FedProx(), FedAdam()], BODY | HEAD),
    "FedPer and FedBN": (lambda: [FedAdam(), FedBN(), FedProx(), FedPer()], BODY),
    "FLIU and FedBN": (lambda: [FLIU(gamma=0.5), FedBN()], BODY | HEAD),
    "APFL": (lambda: [APFL(), FedProx(), FedAdam()], BODY | NORM | HEAD),
    "APFL and FedBN": (lambda: [APFL(), FedBN()], BODY | HEAD),
    "APFL and SCAFFOLD": (lambda: [APFL(weighting="uniform"), SCAFFOLD()], BODY | NORM | HEAD),
    "PLayerFL and SCAFFOLD": (lambda: [PLayerFL(split=1), SCAFFOLD()], BODY | NORM),
    "PLayerFL and FedAdam": (lambda: [PLayerFL(split=1), FedProx(), FedAdam()], BODY | NORM),
    "PLayerFL and FedBN": (lambda: [PLayerFL(split=1), FedBN()], BODY),
    "PLayerFL and FLIU": (lambda: [PLayerFL(split=1), FLIU(gamma=0.5)], BODY | NORM),
    "SCAFFOLD and FedAdam": (lambda: [SCAFFOLD(), FedAdam(), FedProx()], BODY | NORM | HEAD),
    "SCAFFOLD and FedPer": (lambda: [SCAFFOLD(option=1), FedPer()], BODY | NORM),
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.fast_cases(9)
def test_together(name):
    """Runs; each acts on what the others leave to travel; what is kept at home by one stays at home; all are scored."""
    make, shared = TOGETHER[name]
    module, data = NormNet(), toy_data(SIZES)
    callbacks = [*make(), LocalCheckpoint()]
    trainer, spy = spied(module, data, callbacks, max_rounds=3, evaluation=1)
    last = [update for update in spy.updates if update.round == 2]
    assert len(last) == 3
    for update in last:
        assert set(update.state) == shared
        for extras in update.extras.values():
            for value in extras.values():
                assert not isinstance(value, dict) or set(value) == trainable(shared)
    start = module_state(trainer.server.blueprint.build("server"))
    for entry in shared - {"net.0.bias"}:  # a bias before batch normalisation has no gradient
        assert differs({entry: global_state(trainer)[entry]}, start), entry
    same(*({n: s[n] for n in s if n not in shared} for s in (global_state(trainer), start)))
    for client in SIZES:
        state = module_state(trainer.module(client))
        assert differs(state, start)
        assert all((value > 0).all() for key, value in state.items() if key.endswith("running_var"))
        assert trainer.store.get(client).checkpoints["LocalCheckpoint"]["score"] > 0
    assert {"L1", "L2"} <= {row.stage for row in trainer.rows}
    server_optimizer = next((c for c in callbacks if isinstance(c, FedAdam)), None)
    if server_optimizer is not None:
        assert set(trainer.server.state["FedAdam"]["m"]) == trainable(shared)
        weights = dict.fromkeys(SIZES, 1.0) if any(callback.weighting == "uniform" for callback in callbacks) else SIZES
        buffers = {n: v for n, v in mean_of(spy.of_round(2), weights).items() if n not in trainable(shared)}
        same(select(global_state(trainer), buffers), buffers)


def test_round_one_of_player_fl_keeps_what_fedper_keeps():
    """The intersection holds from the first message on: the head never leaves, not even for the probe."""
    _, spy = spied(NormNet(), toy_data(SIZES), [PLayerFL(split=2), FedPer()], max_rounds=2)
    for item in (*spy.messages, *spy.updates):
        assert not set(item.state) & HEAD
    assert {name for update in spy.updates for name in update.state} == BODY | NORM


# -- who acts on what --------------------------------------------------------------------------------------------------


def test_the_proximal_term_beside_apfl_holds_w_only():
    """v is not in the anchor's reach: with a = 1 it trains as without the term, while w is held."""
    module, data = Toy(), toy_data(SIZES)
    runs = {
        mu: federate(module, data, [APFL(alpha=1.0, adaptive=False), *([FedProx(mu)] if mu else [])], max_rounds=2)
        for mu in (0.0, 5.0)
    }
    start = module_state(module)
    free, held = (distance(global_state(runs[mu]), start) for mu in (0.0, 5.0))
    assert held < 0.6 * free
    for client in SIZES:
        same(*(runs[mu].store.get(client).state["APFL"]["v"] for mu in (0.0, 5.0)))
    same(global_state(runs[5.0]), global_state(federate(module, data, [FedProx(5.0)], max_rounds=2)))


@pytest.mark.parametrize("callback", [FENDA("net.3"), FedPer(), PLayerFL(split=1)], ids=["FENDA", "FedPer", "PLayerFL"])
def test_the_proximal_term_holds_what_travels_only(callback):
    """From round 2 on (before p is known, PLayer-FL sends everything)."""
    module, data = Toy(), toy_data({"0": 80})
    moved = {}
    for mu in (0.0, 8.0):
        _, spy = spied(module, data, [callback, FedProx(mu)], max_rounds=2)
        first, second = spy.rounds
        personal = [spy.records[k]["0"].personal for k in (0, 1)]
        heads = [select(state, HEAD) for state in personal]
        moved[mu] = distance(select(first, BODY), select(second, BODY)), distance(*heads)
    assert moved[8.0][0] < 0.6 * moved[0.0][0]
    assert moved[8.0][1] > 0.7 * moved[0.0][1]


@pytest.mark.parametrize("others", [[FedPer()], [FENDA("net.3")], [APFL()], [FLIU()], [PLayerFL(split=1)]], ids=keys)
def test_a_proximal_term_of_strength_zero_changes_nothing(others):
    module, data = NormNet("adam"), toy_data(SIZES)
    a, b = (federate(module, data, [*others, *more], max_rounds=2) for more in ([], [FedProx(mu=0.0)]))
    same(global_state(a), global_state(b))
    for client in SIZES:
        same(module_state(a.module(client)), module_state(b.module(client)))


def test_fliu_with_nothing_of_its_own_beside_fedbn_is_uniform_fedbn():
    module, data = NormNet("adam"), toy_data(SIZES)
    a, b = (federate(module, data, cb, max_rounds=3) for cb in ([FLIU(gamma=0.0), FedBN()], [FedBN("uniform")]))
    same(global_state(a), global_state(b))
    for client in SIZES:
        same(module_state(a.module(client)), module_state(b.module(client)))


@pytest.mark.parametrize("option", [1, 2])
def test_control_variates_beside_player_fl_are_those_of_scaffold(option):
    """With everything shared it is SCAFFOLD, bit for bit: the collecting visit takes no second control variate."""
    module, data = NormNet(), toy_data(SIZES)
    a, b = (federate(module, data, [SCAFFOLD(option), *cb], max_rounds=3) for cb in ([], [PLayerFL(split=2)]))
    same(global_state(a), global_state(b))
    same(a.server.state["SCAFFOLD"]["c"], b.server.state["SCAFFOLD"]["c"])


def test_fedadam_beside_fedper_is_fedadam_on_the_body():
    """One step by hand from the mean of what came."""
    module, data = Toy(), toy_data(SIZES)
    trainer, spy = spied(module, data, [FedPer(), FedAdam(server_lr=0.1)], max_rounds=1)
    mean, start = mean_of(spy.of_round(0), SIZES), module_state(module)
    expected = {}
    for name in BODY:
        delta = mean[name].double() - start[name].double()
        m, v = 0.1 * delta, 0.99e-6 + 0.01 * delta.square()
        expected[name] = (start[name].double() + 0.1 * m / (v.sqrt() + 1e-3)).float()
    close(select(global_state(trainer), BODY), select(expected, BODY))
    same(select(global_state(trainer), HEAD), select(start, HEAD))


def test_order_in_the_list_does_not_matter_for_these():
    module, data = NormNet("adam"), toy_data(SIZES)
    callbacks = [FedPer(), FedProx(0.5), FedAdam(), FedBN()]
    a, b = (federate(module, data, cb, max_rounds=2) for cb in (callbacks, callbacks[::-1]))
    same(global_state(a), global_state(b))


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("callbacks", "sentence"),
    [
        ([FedAdam(), SCAFFOLD(server_lr=0.5)], "FedAdam and SCAFFOLD both claim 'server_step'.*Remove one of them"),
        ([FedAdam(), FedAdam()], "FedAdam is in the list of callbacks 2 times"),
        ([PLayerFL(), PLayerFLRandom()], "PLayerFL and PLayerFLRandom both claim 'plan_round'"),
        ([PLayerFL(), Central()], "both claim 'plan_round'"),
        ([Central(), FedPer()], "Central trains one model on pooled data.*, and FedPer chooses"),
        ([APFL(), Central()], "Central trains one model on pooled data.*, and APFL "),
        ([FLIU(), FedAvg()], "ask for different weightings"),
        ([SCAFFOLD(), FENDA("net.3", weighting="samples")], "ask for different weightings"),
        ([Local(), GlobalCheckpoint()], "GlobalCheckpoint needs a global model.*Use LocalCheckpoint"),
        ([FedPer(), GlobalCheckpoint()], "GlobalCheckpoint needs a global model"),
        ([PLayerFL(), GlobalCheckpoint()], "PLayerFL keeps layers with the clients"),
    ],
)
def test_senseless_pairs(callbacks, sentence):
    with pytest.raises(ValueError, match=sentence):
        federate(Toy(), toy_data(SIZES), callbacks)


class Sends(FederatedCallback):
    def __init__(self, form):
        self.form = form

    def wire(self, module):
        return Wire(up={"values": self.form})


class HoldsParts(FederatedCallback):
    facts = Facts(needs=[Need("gives clients parts of the model", [Change.VALUES])])


def test_values_that_are_shaped_as_the_models_are_a_change_by_what_is_declared():
    federate(Toy(), toy_data(SIZES), [HoldsParts(), Sends("scalar")], max_rounds=1)
    with pytest.raises(
        ValueError, match="HoldsParts gives clients parts of the model, and Sends sends values shaped as"
    ):
        federate(Toy(), toy_data(SIZES), [HoldsParts(), Sends("parameters")], max_rounds=1)


@pytest.mark.parametrize(
    "callbacks",
    [[APFL()], [APFL(mix="logits")], [FENDA("net.3")], [FLIU()], [PLayerFL(split=1)], [FedPer()], [FedBN()], [Local()]],
    ids=keys,
)
def test_the_local_checkpoint_restores_each_deployed_model(callbacks):
    """What is kept is the model that was scored best: scoring it again gives that score."""
    module, data = NormNet("momentum", lr=0.4), toy_data(SIZES)
    trainer = federate(module, data, [*callbacks, LocalCheckpoint(smooth=1)], max_rounds=4, evaluation=1)
    for client in SIZES:
        kept = trainer.store.get(client).checkpoints["LocalCheckpoint"]
        scores = [r.value for r in trainer.rows if (r.stage, r.client, r.metric) == ("L1", client, "val_loss")]
        assert kept["score"] == pytest.approx(min(scores)) and len(scores) == 4
        best = trainer.module(client, "best_local").eval()
        x, y = data.tensors[client]["val"]
        with torch.no_grad():
            assert float(torch.nn.functional.cross_entropy(best(x), y)) == pytest.approx(kept["score"], rel=1e-4)
