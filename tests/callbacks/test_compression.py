"""Codes of changes: what they stand for, their bytes, memory, composition, and codes that are none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedlightning.callbacks import (
    IFCA,
    QSGD,
    SCAFFOLD,
    ClientDP,
    DFedAvg,
    FedAdam,
    FedAvg,
    FedDyn,
    FedExP,
    FedFomo,
    FedGH,
    FedKD,
    FedLAMA,
    FedLP,
    FedPer,
    FedProto,
    FedSoft,
    HeteroFL,
    HeurpFedLA,
    HypCluster,
    QFedAvg,
    RandomK,
    TopK,
    TrimmedMean,
)
from fedlightning.contract.messages import Message, Update
from fedlightning.engines.attempts import FederationError
from fedlightning.server.server import Server
from tests.conformance.case import Case
from tests.helpers import CLASSES, NormNet, Spy, Toy, close, federate, global_state, make_trainer, same, toy_data

CODE = {"one_client": "the server takes what a code stands for"}
CASES = {
    "TopK": Case(TopK(share=0.2), skip=CODE),
    "RandomK": Case(RandomK(share=0.3), skip=CODE),
    "QSGD": Case(QSGD(), skip=CODE),
}
SIZES = {"0": 24, "1": 40, "2": 16}
CODECS = [TopK(share=0.2), TopK(share=0.2, feedback=False), RandomK(share=0.3), QSGD(), QSGD(levels=1, bucket=16)]


def module(kind=Toy):
    torch.manual_seed(0)
    return kind()


def visit(number=0):
    return Message(round=number, client="a", state={}, returns=())


def client(**kept):
    return SimpleNamespace(id="a", seed=0, state=kept, rng=lambda purpose: torch.Generator().manual_seed(1))


SERVER = SimpleNamespace(seed=0)


def stands_for(codec, change, message, one):
    return codec.change(codec.code(change, message, one), len(change), message, SERVER)


# -- one code ----------------------------------------------------------------------------------------------------------
def test_the_largest_elements_are_sent_and_the_rest_is_kept():
    change = torch.tensor([0.5, -3.0, 0.25, 2.0, -1.0], dtype=torch.float64)
    one, codec = client(), TopK(share=0.4)
    code = codec.code(change, visit(), one)
    assert code["places"].tolist() == [1, 3] and code["values"].tolist() == [-3.0, 2.0]
    assert one.state["TopK"]["left"]["global"].tolist() == [0.5, 0.0, 0.25, 0.0, -1.0]
    again = codec.code(torch.tensor([2.0, 0.0, 0.0, 0.0, -1.0], dtype=torch.float64), visit(1), one)
    assert again["places"].tolist() == [0, 4] and again["values"].tolist() == [2.5, -2.0]  # what was kept is there too


def test_memory_telescopes():
    draw, one, codec = torch.Generator().manual_seed(0), client(), TopK(share=0.1)
    changes = [torch.randn(200, generator=draw, dtype=torch.float64) for _ in range(30)]
    sent = [stands_for(codec, change, visit(number), one) for number, change in enumerate(changes)]
    left = one.state["TopK"]["left"]["global"].double()
    assert torch.allclose(torch.stack(changes).sum(0), torch.stack(sent).sum(0) + left, atol=1e-5)


@pytest.mark.parametrize("codec", [RandomK(share=0.3), QSGD(levels=4, bucket=16), QSGD()], ids=repr)
def test_the_mean_over_draws_is_the_change_and_the_variance_is_bounded(codec):
    change = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = torch.Generator().manual_seed(5)
    one = SimpleNamespace(id="a", seed=0, state={}, rng=lambda purpose: draws)
    found = torch.stack([stands_for(codec, change, visit(number), one) for number in range(4000)])
    error = found.mean(0) - change
    assert bool((error.abs() <= 5 * found.std(0) / 4000**0.5 + 1e-6).all())
    if isinstance(codec, QSGD):
        size, s = codec.bucket if codec.bucket < 64 else 64, codec.levels
        for part, was in zip(found.split(size, dim=1), change.split(size), strict=True):
            bound = min(size / s**2, size**0.5 / s) * float(was.square().sum())
            assert float((part - was).square().sum(1).mean()) <= bound * 1.05


def test_whole_and_zero_changes():
    change = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for codec in (TopK(share=1.0), RandomK(share=1.0)):
        assert torch.allclose(stands_for(codec, change, visit(), client()), change, atol=1e-6)
    for codec in CODECS:
        assert not stands_for(codec, torch.zeros(50, dtype=torch.float64), visit(), client()).any()


# -- a federation ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_bytes_are_those_of_the_code_and_others_see_whole_updates(codec):
    spy, size = Spy(), sum(value.numel() for value in module().state_dict().values())
    trainer = federate(module(), toy_data(SIZES), [codec, spy], max_rounds=2)
    count = max(1, round(getattr(codec, "share", 0) * size))
    each = {"TopK": 8 * count, "RandomK": 4 * count, "QSGD": size + 4 * -(-size // getattr(codec, "bucket", 1))}[
        codec.key
    ]
    assert trainer.server.costs.bytes_up == 2 * 3 * each < trainer.server.costs.bytes_down
    updates = spy.of_round(1)
    assert all(set(update.state) == set(module().state_dict()) and not update.extras for update in updates.values())


def test_everything_is_nearly_plain_averaging():
    plain = global_state(federate(module(), toy_data(SIZES), [FedAvg()], max_rounds=3))
    for codec in (TopK(share=1.0), RandomK(share=1.0), QSGD(bucket=1)):
        close(global_state(federate(module(), toy_data(SIZES), [FedAvg(), codec], max_rounds=3)), plain, atol=1e-5)


def test_statistics_and_what_stays_are_not_touched():
    spy = Spy()
    federate(module(NormNet), toy_data(SIZES), [FedPer(), QSGD(), spy], max_rounds=1)
    (update, *_) = spy.of_round(0).values()
    assert any("running_mean" in name for name in update.state)


@pytest.mark.parametrize("codec", CODECS[:4], ids=repr)
@pytest.mark.parametrize("others", [[FedAdam()], [SCAFFOLD()], [TrimmedMean(0.34)], [FedPer()]], ids=str)
def test_it_stands_beside_others(codec, others):
    trainer = federate(module(), toy_data(SIZES), [*others, codec], max_rounds=2)
    assert trainer.rounds_done == 2 and trainer.server.costs.bytes_up < trainer.server.costs.bytes_down


def test_sub_models_are_encoded_at_their_own_size():
    trainer = federate(module(), toy_data(SIZES), [HeteroFL(), RandomK(share=0.5)], max_rounds=2, gradient_clip_val=1.0)
    assert trainer.rounds_done == 2


@pytest.mark.parametrize(
    ("callbacks", "reason"),
    [
        ([ClientDP(delta=1e-3, noise_multiplier=1.0), TopK()], "ClientDP"),
        ([DFedAvg(), QSGD()], "DFedAvg"),
        ([TopK(), QSGD()], "both claim 'encode'"),
        ([FedKD(), TopK()], "FedKD"),
        ([FedDyn(), QSGD()], "FedDyn"),
        ([FedExP(), RandomK()], "FedExP"),  # whose step goes by the lengths of changes, which a code changes
        ([QFedAvg(), RandomK()], "QFedAvg"),
        ([FedLP(), RandomK()], "FedLP"),
        ([FedSoft(), QSGD()], "FedSoft does not send clients the entries of the model that it asks back"),
        ([FedFomo(), RandomK()], "FedFomo does not send"),
        ([FedGH(), QSGD()], "FedGH does not send"),
        ([FedLAMA(), RandomK()], "FedLAMA does not send"),
        ([HeurpFedLA(), QSGD()], "HeurpFedLA does not send"),
        ([FedProto(), QSGD()], "no trainable entry travels here"),
    ],
    ids=str,
)
def test_what_is_refused(callbacks, reason):
    with pytest.raises(ValueError, match=reason):
        federate(module(), toy_data(SIZES), callbacks, max_rounds=1)


class Tied(Toy):
    def make(self, hidden, dropout):
        net = super().make(hidden, dropout)
        self.again = net[0]
        return net


@pytest.mark.parametrize("codec", [RandomK(share=0.5), QSGD()], ids=repr)
def test_a_tensor_under_two_names_has_one_code(codec):
    trainer = federate(module(Tied), toy_data(SIZES), [codec], max_rounds=2)
    model = trainer.server.model
    assert torch.equal(model["again.weight"], model["net.0.weight"])
    whole = federate(module(), toy_data(SIZES), [codec], max_rounds=2)
    assert trainer.server.costs.bytes_up == whole.server.costs.bytes_up


@pytest.mark.parametrize("codec", [TopK(share=0.2), QSGD()], ids=repr)
def test_resume_and_engines_give_the_same_bits(codec, tmp_path):
    def trainer(name, rounds, **options):
        return make_trainer(tmp_path, [codec], max_rounds=rounds, name=name, **options)

    whole, cut, again = trainer("whole", 4), trainer("cut", 2), trainer("cut", 4)
    for one, options in ((whole, {}), (cut, {}), (again, {"resume": "last"})):
        one.fit(module(), datamodule=toy_data(SIZES), **options)
    same(global_state(again), global_state(whole))
    assert again.server.costs.bytes_up == whole.server.costs.bytes_up
    lightning = trainer("other", 4, local_loop="trainer")
    lightning.fit(module(), datamodule=toy_data(SIZES))
    same(global_state(lightning), global_state(whole))


# -- several models that a client may choose from --------------------------------------------------------------------------
def several(callbacks, rounds=4):
    """Clients whose labels are named differently, so that each centre has clients; and the memory that they keep."""
    data = toy_data(SIZES | {"3": 30, "4": 20})
    for name in ("1", "3"):
        x, labels = data.tensors[name]["train"]
        data.tensors[name]["train"] = (x, (labels + 1) % CLASSES)
    trainer = federate(module(), data, callbacks, max_rounds=rounds)
    chosen = {cluster for shares in callbacks[0].memberships(trainer.server).values() for cluster in shares}
    return trainer, chosen


@pytest.mark.parametrize("kind", [IFCA, HypCluster])
@pytest.mark.parametrize("codec", [RandomK(share=1.0), TopK(share=1.0, feedback=False), QSGD(bucket=1)], ids=repr)
def test_a_code_counts_from_the_model_that_a_client_chose(kind, codec):
    plain, chosen = several([kind(num_clusters=2)])
    coded, _ = several([kind(num_clusters=2), codec])
    assert chosen == {"global", "centre 1"}
    for name, state in plain.server.models.items():
        close(coded.server.models[name], state, atol=1e-5)


def test_memory_is_of_the_model_that_a_client_chose():
    one, codec, change = client(), TopK(share=0.5), torch.tensor([1.0, -2.0], dtype=torch.float64)
    codec.code(change, visit(), one)
    other = codec.code(torch.zeros(2, dtype=torch.float64), replace(visit(1), model="centre 1"), one)
    assert not other["values"].any()
    again = codec.code(torch.zeros(2, dtype=torch.float64), visit(2), one)
    assert again["values"].tolist() == [1.0]


def test_an_update_that_names_another_model_is_measured_against_that():
    server = SimpleNamespace(models={"global": {"w": torch.zeros(2)}, "centre 1": {"w": torch.ones(2)}})
    message = replace(visit(), state={"w": torch.zeros(2)})
    for model, value in (("global", 0.0), ("centre 1", 1.0), ("nobody's", 0.0), (["global"], 0.0)):
        start = Server.message_of_choice(server, message, Update(0, "a", model=model)).state
        assert start["w"].tolist() == [value] * 2


# -- what came is not to be trusted ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("codec", "wrong"),
    [
        (TopK(share=0.5), {"places": torch.tensor([0, 9], dtype=torch.int32)}),
        (TopK(share=0.5), {"places": torch.tensor([1, 1], dtype=torch.int32)}),
        (TopK(share=0.5), {"places": torch.tensor([0, 1, 2], dtype=torch.int32)}),
        (TopK(share=0.5), {"values": torch.tensor([1.0, float("nan")])}),
        (RandomK(share=0.5), {"values": torch.ones(3)}),
        (RandomK(share=0.5), {"values": torch.ones(2, dtype=torch.float64)}),
        (QSGD(levels=7), {"levels": torch.full((4,), 8, dtype=torch.int8)}),
        (QSGD(), {"norms": torch.tensor([-1.0])}),
        (QSGD(), {"norms": None}),
        (QSGD(), None),
    ],
    ids=str,
)
def test_what_is_no_code_is_refused(codec, wrong):
    code = codec.code(torch.tensor([1.0, -2.0, 0.5, 0.25], dtype=torch.float64), visit(), client())
    with pytest.raises(ValueError, match="its "):
        codec.change(None if wrong is None else code | wrong, 4, visit(), SERVER)


def test_a_client_that_sends_none_has_failed():
    class Liar(TopK):
        @property
        def key(self):
            return "TopK"

        def encode(self, client, update):
            super().encode(client, update)
            update.extras["TopK"]["places"] = update.extras["TopK"]["places"] - 10**6

    with pytest.raises(FederationError, match="different ones below"):
        federate(module(), toy_data(SIZES), [Liar()], max_rounds=1)


def test_an_update_counts_its_code_once():
    update = Update(0, "a", state={"w": torch.zeros(10)}, code_bytes=7)
    assert update.num_bytes == 7
