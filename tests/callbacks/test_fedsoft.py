"""FedSoft: sheet B 1.3."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import FLIU, MOON, FedPer, FedProx, FedSoft, Local
from fedlightning.callbacks.fedsoft import shares, weighted_sum
from fedlightning.seeding import generator
from fedlightning.tensors import module_state
from tests.callbacks.common import Breaks, Plain, descend, fixed_data, mean_state, start_of
from tests.callbacks.common import batches as batches_of
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import NormNet, Quadratic, Toy, close, differs, federate, quadratic_data, same, spied, toy_data

CASES = {
    "FedSoft": Case(FedSoft(), neutral=FedSoft(lam=0.0)),
    "FedSoft drawn": Case(
        FedSoft(selected=1, interval=1),
        skip={**NO_PLAIN_FORM, "identical_clients": "each centre draws one client, so that some take part less often"},
    ),
}
KEPT = {
    "FedSoft": Kept(
        "FedSoft", server=("shares", "trained"), client=("model",), models=("global", "centre 1", "centre 2")
    )
}

A = [[1.0, 2.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.5, 2.0]]
B = [[5.0, 5.0, 4.0], [-5.0, -4.0, -5.0], [4.0, 5.0, 5.0], [-5.0, -5.0, -6.0]]


def u(trainer):
    return {client: share.tolist() for client, share in trainer.server.state["FedSoft"]["shares"].items()}


# -- importance --------------------------------------------------------------------------------------------------------


def test_shares_are_the_counts_of_an_independent_computation():
    module, data = NormNet("sgd"), toy_data([24, 40, 16])
    trainer, spy = spied(module, data, [FedSoft(3)], max_rounds=1)
    centres = next(m for m in spy.messages if m.tag == "estimate").extras["FedSoft"]["centres"]
    for client, share in u(trainer).items():
        x, y = data.tensors[client]["train"]
        losses = []
        for state in centres.values():
            model = NormNet().eval()
            model.load_state_dict(state)
            losses.append([F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).item() for i in range(len(y))])
        counts = [0, 0, 0]
        for column in zip(*losses, strict=True):
            counts[column.index(min(column))] += 1
        assert sum(counts) == len(y)
        assert share == pytest.approx([count / len(y) if count else 1e-4 for count in counts], abs=1e-12)


def test_one_centre_has_all_of_the_data():
    trainer, spy = spied(Toy(), toy_data(), [FedSoft(1, sigma=0.5)], max_rounds=1)
    assert u(trainer) == {"0": [1.0], "1": [1.0], "2": [1.0]}
    updates = [update for update in spy.of_round(0).values() if update.state]
    for name, value in trainer.server.models["centre 1"].items():
        mean = sum(update.num_samples * update.state[name].double() for update in updates) / 80
        assert torch.allclose(value.double(), mean, atol=1e-7)


def test_equal_centres_are_a_tie_for_the_first():
    with pytest.warns(UserWarning, match=r"FedSoft\(init=0\) starts all centres from one model"):
        trainer = federate(Toy(), toy_data(), [FedSoft(3, init=0)], max_rounds=1)
    assert set(map(tuple, u(trainer).values())) == {(1.0, 1e-4, 1e-4)}


def test_a_sample_counts_once_and_absent_ones_get_sigma():
    losses = torch.rand(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = shares(losses, 0.0)
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    assert shares(losses[:1].expand(2, -1), 0.25).tolist() == [1.0, 0.25]


def test_estimates_are_taken_every_interval_and_at_first_sight():
    _, spy = spied(Toy(), toy_data([8] * 5), [FedSoft(interval=3)], max_rounds=5, participation=3)
    known = set()
    for number in range(5):
        asked = {m.client for m in spy.messages if m.round == number and m.tag == "estimate"}
        came = {m.client for m in spy.messages if m.round == number}
        assert asked == (came if number % 3 == 0 else came - known)
        known |= came


# -- the client --------------------------------------------------------------------------------------------------------


def test_the_gradient_of_the_pull_is_that_of_the_loss():
    """(f) The form with one tensor equals lam/2 sum_s u_s ||w - c_s||^2 through autograd."""
    draw = torch.Generator().manual_seed(0)
    centres = [{"w": torch.randn(7, generator=draw, dtype=torch.float64)} for _ in range(3)]
    share, lam = [0.5, 0.3, 1e-4], 0.7
    w = torch.randn(7, generator=draw, dtype=torch.float64, requires_grad=True)
    loss = lam / 2 * sum(s * (w - c["w"]).square().sum() for s, c in zip(share, centres, strict=True))
    (expected,) = torch.autograd.grad(loss, w)

    ctx = SimpleNamespace(payload={"target": weighted_sum(share, centres), "total": sum(share)})
    found = FedSoft(lam=lam).correct_gradient(ctx, "w", w.detach(), torch.zeros(7, dtype=torch.float64))
    assert torch.allclose(found, expected, atol=1e-10, rtol=0)


def test_local_training_is_plain_training_with_the_pull():
    module, data = Toy("momentum"), toy_data()
    trainer, spy = spied(module, data, [FedSoft(2, lam=0.5)], max_rounds=1, local_epochs=2)
    centres = next(m for m in spy.messages if m.tag == "estimate").extras["FedSoft"]["centres"]
    for client, share in u(trainer).items():
        model = Toy("momentum")
        model.load_state_dict(module_state(module))

        def pull(model=model, share=share):
            return 0.25 * sum(
                s * (value - centre[name]).square().sum()
                for s, centre in zip(share, centres.values(), strict=True)
                for name, value in model.named_parameters()
            )

        descend(model, model.configure_optimizers(), batches_of(data, client, epochs=2), pull)
        close(spy.of_round(0)[client].state, module_state(model), atol=1e-5)


def test_a_step_of_the_whole_pull_ends_at_the_mean_of_the_centres():
    """(c) With lr lam U = 1 one step puts w at the u-weighted mean of the centres, minus the step of the loss."""
    lr = 0.1
    _trainer, spy = spied(Quadratic(lr), quadratic_data(A, B), [FedSoft(2, lam=1 / lr / 1.0, sigma=0.0, init=0.3)])
    centres = next(m for m in spy.messages if m.tag == "estimate").extras["FedSoft"]["centres"]
    for client, update in spy.of_round(0).items():
        share = spy.states[0]["FedSoft"]["shares"][client]
        mean = sum(s * c["w"] for s, c in zip(share, centres.values(), strict=True))
        a, b = (torch.tensor(rows[int(client)], dtype=torch.float64) for rows in (A, B))
        close(update.state, {"w": mean - lr * a * (0 - b)}, atol=1e-12)


def test_without_a_pull_clients_train_alone():
    module, data = Toy("adam", dropout=0.2), toy_data()
    ours, _spy = spied(module, data, [FedSoft(2, lam=0.0)], max_rounds=3)
    alone = federate(module, data, [Local()], max_rounds=3, optimizer_state="reset")
    for client in ("0", "1", "2"):
        same(module_state(ours.module(client)), module_state(alone.module(client)))


# -- the server --------------------------------------------------------------------------------------------------------


def test_centres_are_means_by_share_and_samples():
    trainer, spy = spied(NormNet("sgd"), toy_data([24, 40, 16]), [FedSoft(2)], max_rounds=1)
    updates = spy.of_round(0)
    for s in (0, 1):
        weights = {c: u(trainer)[c][s] * updates[c].num_samples for c in updates}
        for name, value in trainer.server.models[f"centre {s + 1}"].items():
            if value.is_floating_point():
                mean = sum(w * updates[c].state[name].double() for c, w in weights.items()) / sum(weights.values())
                assert torch.allclose(value.double(), mean, atol=1e-6), name


def test_drawn_clients_train_once_and_count_alike():
    trainer, spy = spied(Toy(), toy_data([8] * 6), [FedSoft(3, selected=2)], max_rounds=4)
    for number in range(4):
        trained = [m.client for m in spy.messages if m.round == number and m.tag == ""]
        assert len(trained) == len(set(trained)) <= 6
    drawn = FedSoft(3, selected=2).draw(trainer.server, trainer.server.clients)
    for weights in drawn.values():
        assert len(weights) == 2 and set(weights.values()) == {1.0}


def test_clients_are_drawn_by_their_weights():
    """Of two thirds of the data and one third, twice as many draws; a share of 0 is never drawn."""

    shares_of = {c: torch.tensor([v], dtype=torch.float64) for c, v in (("a", 1.0), ("b", 0.5), ("c", 0.0))}
    count = {"a": 0, "b": 0}
    for number in range(600):
        server = SimpleNamespace(
            state={"FedSoft": {"shares": shares_of}},
            num_samples={"a": 10, "b": 10, "c": 10},
            rng=lambda purpose, source, number=number: generator(number, purpose),
        )
        (chosen,) = FedSoft(1, selected=1).draw(server, ["a", "b", "c"])["centre 1"]
        count[chosen] += 1
    assert count["a"] == pytest.approx(400, abs=60)


def test_absent_clients_keep_their_model_and_share():
    trainer, spy = spied(Toy(), toy_data([8] * 4), [FedSoft()], max_rounds=4, participation=2)
    for number in range(1, 4):
        for client in set(trainer.server.clients) - set(spy.of_round(number)):
            before = spy.states[number - 1]["FedSoft"]["shares"].get(client)
            after = spy.states[number]["FedSoft"]["shares"].get(client)
            assert (before is None and after is None) or torch.equal(before, after)


def test_planted_groups_get_a_centre_each():
    trainer = federate(Quadratic(0.3), quadratic_data(A, B), [FedSoft(2, init=0.3)], max_rounds=8)
    best = {client: share.index(max(share)) for client, share in u(trainer).items()}
    assert best["0"] == best["2"] != best["1"] == best["3"]


# -- with others -------------------------------------------------------------------------------------------------------


def test_terms_with_a_common_anchor_are_named_and_do_nothing():
    module, data = Toy(), toy_data()
    with pytest.warns(UserWarning, match="no anchor that FedProx, MOON could refer to"):
        ours = federate(module, data, [FedSoft(), FedProx(9.0), MOON(9.0)], max_rounds=2)
    plain = federate(module, data, [FedSoft()], max_rounds=2)
    for client in ("0", "1", "2"):
        same(module_state(ours.module(client)), module_state(plain.module(client)))


def test_a_client_goes_on_from_its_own_model_which_nothing_else_merges():
    with pytest.raises(ValueError, match="FedSoft and FLIU both merge the model that arrives"):
        federate(Toy(), toy_data(), [FedSoft(), FLIU()])


def test_bodies_pulled_under_personal_heads():
    trainer, spy = spied(Toy(), toy_data(), [FedPer(), FedSoft()], max_rounds=2)
    assert all(set(update.state) <= {"net.0.weight", "net.0.bias"} for update in spy.updates)
    assert differs(module_state(trainer.module("0")), module_state(trainer.module("1")))


def test_a_module_that_cannot_be_initialised_anew_is_refused():
    with pytest.raises(ValueError, match=r"FedSoft cannot initialise Quadratic anew.*FedSoft\(init=0.1\)"):
        federate(Quadratic(), quadratic_data(A, B), [FedSoft()])


@pytest.mark.parametrize(
    "options", [{"num_clusters": 0}, {"lam": -1.0}, {"sigma": 2.0}, {"selected": 0}, {"interval": 0}, {"init": -1.0}]
)
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=rf"FedSoft got .*{next(iter(options))}="):
        FedSoft(**options)


# -- a whole federation by hand ----------------------------------------------------------------------------------------


class Noted(FedSoft):
    """Notes the starts of its centres, who could be drawn and who was."""

    key = "FedSoft"

    def on_federation_start(self, server):
        super().on_federation_start(server)
        NOTED["starts"], NOTED["drawn"] = {centre: dict(server.models[centre]) for centre in self.centres}, []

    def draw(self, server, available):
        drawn = super().draw(server, available)
        NOTED["drawn"].append((list(available), drawn))
        return drawn


NOTED: dict = {}


@pytest.mark.parametrize(
    "options",
    [{}, {"selected": 2, "interval": 3, "lam": 1.0}, {"num_clusters": 3, "interval": 1, "sigma": 0.01}],
    ids=["all", "drawn", "three centres"],
)
def test_a_federation_by_hand(options):
    """Four of six clients are there in a round; one breaks when it trains, but answers when it is asked for its shares."""
    data, start = fixed_data([16, 24, 16, 8, 20, 8], worlds=2, broken="4"), start_of(Breaks)
    algorithm = Noted(init=0.3, **options)
    with pytest.warns(UserWarning, match="'4' failed"):
        trainer, spy = spied(start, data, [algorithm], max_rounds=5, participation=4)
    centres, own, u = dict(NOTED["starts"]), {}, {}
    sizes = {client: len(splits["train"][0]) for client, splits in data.tensors.items()}
    for number in range(5):
        messages, (available, drawn) = [m for m in spy.messages if m.round == number], NOTED["drawn"][number]
        asked = {message.client for message in messages if message.work == 0}
        assert asked == {c for c in available if c not in u or number % algorithm.interval == 0}
        for client in asked:
            x, y = data.tensors[client]["train"]
            losses = torch.stack([F.cross_entropy(Plain(c)(x), y, reduction="none") for c in centres.values()])
            counts = [int((losses.argmin(0) == s).sum()) for s in range(len(centres))]
            assert sum(counts) == sizes[client]
            u[client] = [n / sizes[client] if n else algorithm.sigma for n in counts]
        found = spy.states[number]["FedSoft"]["shares"]
        assert {c: shares.tolist() for c, shares in found.items()} == {c: pytest.approx(one) for c, one in u.items()}
        trained = {}
        for client in (message.client for message in messages if message.work != 0):
            now = list(centres.values())

            def pull(place, w, shares=u[client], held=now):
                return algorithm.lam * sum(
                    share * (w - list(centre.values())[place]) for share, centre in zip(shares, held, strict=True)
                )

            if client != "4":
                state = own.get(client, module_state(start))
                trained[client] = own[client] = Plain(state).trained(*data.tensors[client]["train"], pull)
        for s, centre in enumerate(centres):
            if algorithm.selected is None:
                assert drawn[centre] == pytest.approx({c: u[c][s] * sizes[c] for c in available})
            else:
                assert set(drawn[centre].values()) == {1.0} and len(drawn[centre]) == 2
            parts = [(weight, trained[client]) for client, weight in drawn[centre].items() if client in trained]
            centres[centre] = mean_state(parts) if parts else centres[centre]
        assert set(trained) | {"4"} >= set().union(*drawn.values()) >= set(trained)
    assert {"0", "1", "2", "3"} <= set(own) <= set("01235")
    for centre, state in centres.items():
        close(trainer.server.models[centre], state, atol=1e-9, rtol=0)
    for client in sizes:
        close(module_state(trainer.module(client)), own.get(client, module_state(start)), atol=1e-9, rtol=0)


def test_the_chances_of_a_draw_are_those_of_drawing_one_after_another():
    known = {"a": torch.tensor([0.7, 0.3]), "b": torch.tensor([0.2, 0.8]), "c": torch.tensor([0.5, 0.5])}
    sizes, draws = {"a": 10, "b": 30, "c": 20}, 1000
    algorithm, counts = FedSoft(2, selected=2), Counter()
    for number in range(draws):
        server = SimpleNamespace(
            state={"FedSoft": {"shares": known}},
            num_samples=sizes,
            rng=lambda purpose, source, n=number: generator(n, purpose),
        )
        for centre, members in algorithm.draw(server, list(sizes)).items():
            counts.update((centre, client) for client in members)
    for s, centre in enumerate(algorithm.centres):
        v = {c: float(known[c][s]) * sizes[c] for c in sizes}
        v = {c: one / sum(v.values()) for c, one in v.items()}
        for client in sizes:
            chance = v[client] + sum(v[o] * v[client] / (1 - v[o]) for o in sizes if o != client)
            assert counts[centre, client] / draws == pytest.approx(chance, abs=0.04)


def test_a_client_without_a_loss_is_told_of_although_it_is_never_drawn():
    data = toy_data([24, 40, 16])
    x, y = data.tensors["1"]["train"]
    data.tensors["1"]["train"] = x * torch.nan, y
    with pytest.warns(UserWarning, match="client '1' failed: .*no training sample of client '1' with a loss"):
        trainer, _ = spied(Toy(), data, [FedSoft(selected=1, interval=1)], max_rounds=1)
    assert set(u(trainer)) == {"0", "2"}
