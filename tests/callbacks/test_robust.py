"""Robust rules: formulas in plain numpy, bounds, what is refused, and attacks that the mean does not bear."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fedlightning.callbacks import CFL, IFCA, SCAFFOLD, FedBuff, FedGroup, FedLP, FedPer, FedProto, HeteroFL
from fedlightning.callbacks.attacks import GaussianAttack, ModelReplacement, SignFlip
from fedlightning.callbacks.robust import (
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    NormClippedMean,
    TrimmedMean,
)
from fedlightning.callbacks.shared.robust_rules import capped
from fedlightning.contract import Change, Facts, FederatedCallback
from fedlightning.options import FailurePolicy
from fedlightning.virtual_time import Asynchronous
from tests.helpers import NormNet, Toy, federate, global_state, make_trainer, same, toy_data

RULES = [
    NormClippedMean(),
    NormClippedMean(max_norm=2.0),
    CoordinateMedian(),
    TrimmedMean(trim=0.3),
    Krum(bad=2),
    Krum(bad=2, chosen=4),
    GeometricMedian(),
    GeometricMedian(weighted=True),
    CenteredClipping(),
    CenteredClipping(radius=2.0),
    CoordinateMedian(mixing=2),
]
SHAPES = {"0": 24, "1": 24, "2": 24, "3": 24, "4": 24}


def draws(m, d=5, seed=0, scale=1.0):
    return scale * torch.randn(m, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shares(m):
    weights = torch.arange(1.0, m + 1, dtype=torch.float64)
    return weights / weights.sum()


def combined(rule, changes, weights=None):
    """What a rule makes of changes, by way of updates: mixing and names too."""
    weights = shares(len(changes)) if weights is None else weights
    return rule._combined(
        {"w": torch.zeros(changes.shape[1], dtype=torch.float64)}, ["w"], [{"w": row} for row in changes], weights
    )["w"]


# -- formulas, without our code ----------------------------------------------------------------------------------------
def mean_of_clipped(u, a, limit):
    norms = np.linalg.norm(u, axis=1)
    limit = np.median(norms) if limit is None else limit
    return sum(share * row * min(1.0, limit / norm) for share, row, norm in zip(a, u, norms, strict=True))


def krum(u, f, chosen):
    scores = []
    for i in range(len(u)):
        others = sorted(float(((u[i] - u[j]) ** 2).sum()) for j in range(len(u)) if j != i)
        scores.append(sum(others[: len(u) - f - 2]))
    return u[np.argsort(scores, kind="stable")[:chosen]].mean(axis=0)


def trimmed(u, trim):
    k = int(np.floor(trim * len(u)))
    return np.array([np.sort(column)[k : len(u) - k].mean() for column in u.T])


@pytest.mark.parametrize("m", [7, 8, 11])
@pytest.mark.parametrize("seed", range(3))
def test_the_formulas(m, seed):
    u, a = draws(m, seed=seed), shares(m)
    n, w = u.numpy(), a.numpy()
    for rule, expected in (
        (NormClippedMean(), mean_of_clipped(n, w, None)),
        (NormClippedMean(max_norm=1.5), mean_of_clipped(n, w, 1.5)),
        (CoordinateMedian(), np.median(n, axis=0)),
        (TrimmedMean(trim=0.3), trimmed(n, 0.3)),
        (Krum(bad=2), krum(n, 2, 1)),
        (Krum(bad=1, chosen=3), krum(n, 1, 3)),
    ):
        assert combined(rule, u).numpy() == pytest.approx(expected, abs=1e-12), rule
    centre = np.zeros(u.shape[1])
    for _ in range(3):
        apart = n - centre
        far = np.linalg.norm(apart, axis=1)
        centre = centre + (apart * np.minimum(1, np.median(far) / far)[:, None]).mean(axis=0)
    assert combined(CenteredClipping(), u).numpy() == pytest.approx(centre, abs=1e-12)
    nearest = [np.argsort([((one - other) ** 2).sum() for other in n], kind="stable")[: m - 2] for one in n]
    mixed = np.median([n[index].mean(axis=0) for index in nearest], axis=0)
    assert combined(CoordinateMedian(mixing=2), u).numpy() == pytest.approx(mixed, abs=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_no_other_point_has_a_smaller_sum_of_distances(weighted):
    u = draws(9)
    a = capped(shares(9), 0.4) if weighted else torch.full((9,), 1 / 9, dtype=torch.float64)
    point = combined(GeometricMedian(weighted=weighted), u)
    best = float(a @ (u - point).norm(dim=1))
    for step in draws(200, scale=0.05, seed=1):
        assert float(a @ (u - point - step).norm(dim=1)) >= best - 1e-9


# -- invariants --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_equal_changes_give_that_change(rule):
    u = draws(1).repeat(9, 1)
    torch.testing.assert_close(combined(rule, 0.1 * u), 0.1 * u[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_order_of_clients_does_not_matter(rule):
    u, a = draws(9), shares(9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(combined(rule, u, a), combined(rule, u[order], a[order]), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "rule", [one for one in RULES if not isinstance(one, NormClippedMean | CenteredClipping)], ids=repr
)
def test_a_shift_of_all_shifts_the_result(rule):
    u, shift = draws(9), draws(1, seed=5)[0]
    torch.testing.assert_close(combined(rule, u + shift), combined(rule, u) + shift, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_bad_clients_do_not_move_it_far(rule):
    """Of nine clients as many are bad as each rule bears, at a million; the good ones lie within a few units of 0."""
    bad = {TrimmedMean: 2, Krum: 2}.get(type(rule), 2 if rule.mixing else 4)
    u = draws(9)
    good = float(u[bad:].norm(dim=1).max())
    for where in (1e6, -1e6):
        u[:bad] = where
        uniform = torch.full((9,), 1 / 9, dtype=torch.float64)
        assert float(combined(rule, u, uniform).norm()) <= 3 * good, rule
    assert float(u.mean(dim=0).norm()) > 1e5


def test_one_client_moves_a_clipped_mean_by_its_weight_times_the_limit():
    rule, u, a = NormClippedMean(max_norm=1.0), draws(9), shares(9)
    for place, value in itertools.product(range(9), (1e6, -3.0, 0.0)):
        other = u.clone()
        other[place] = value
        moved = float((combined(rule, u, a) - combined(rule, other, a)).norm())
        assert moved <= 2 * float(a[place]) * 1.0 + 1e-12


def test_edges():
    u = draws(9)
    torch.testing.assert_close(combined(TrimmedMean(trim=0.0), u), u.mean(dim=0))
    torch.testing.assert_close(combined(TrimmedMean(trim=0.49), u), combined(CoordinateMedian(), u))
    torch.testing.assert_close(combined(Krum(bad=0, chosen=9), u), u.mean(dim=0))
    assert any(torch.equal(combined(Krum(bad=3), u), row) for row in u)
    assert combined(TrimmedMean(trim=0.49999999999), draws(4)).isfinite().all()
    assert TrimmedMean(trim=1e-7).least() == 10**7
    wide = NormClippedMean(max_norm=1e9, max_share=1.0)
    torch.testing.assert_close(combined(wide, u), shares(9) @ u)


def test_weights_are_capped_and_sum_to_1():
    for weights, most in (([0.9, 0.05, 0.05], 0.5), ([0.5, 0.3, 0.2], 0.2), ([1.0], 0.1), ([0.4, 0.4, 0.1, 0.1], 0.3)):
        found = capped(torch.tensor(weights, dtype=torch.float64), most)
        assert float(found.sum()) == pytest.approx(1.0)
        assert float(found.max()) <= max(most, 1 / len(weights)) + 1e-9
    kept = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    assert torch.equal(capped(kept, 0.5), kept)


# -- in federations ----------------------------------------------------------------------------------------------------
def module(kind=Toy):
    torch.manual_seed(0)
    return kind()


def test_without_clipping_it_is_fedavg():
    rule = NormClippedMean(max_norm=1e9, max_share=1.0)
    plain, ruled = (global_state(federate(module(), toy_data(), one, max_rounds=3)) for one in ([], [rule]))
    torch.testing.assert_close(ruled, plain)


@pytest.mark.parametrize("attack", [SignFlip(["0"], 20.0), ModelReplacement(["0"], 30.0), GaussianAttack(["0"], 3.0)])
@pytest.mark.parametrize(
    "rule", [NormClippedMean(), CoordinateMedian(), Krum(bad=1), GeometricMedian(), CenteredClipping()]
)
@pytest.mark.fast_cases(3)
def test_an_attack_that_the_mean_does_not_bear(attack, rule):
    def loss(callbacks):
        options = {"max_rounds": 4, "evaluation": 4, "local_steps": 6, "failures": FailurePolicy(update_limit=None)}
        trainer = federate(module(), toy_data(SHAPES, batch_size=8), callbacks, **options)
        return np.mean(
            [row.value for row in trainer.rows if (row.stage, row.split, row.metric) == ("G", "val", "val_loss")]
        )

    honest, attacked, defended = loss([]), loss([attack]), loss([attack, rule])
    assert attacked > honest + 0.2
    assert defended < (attacked + honest) / 2


def test_buffers_are_medians_and_bad_ones_do_not_enter():
    names = [name for name, _ in NormNet().named_buffers()]
    running = next(name for name in names if name.endswith("running_mean"))

    class Bad(FederatedCallback):
        def on_send(self, client, update):
            if client.id == "0":
                update.state[running] = torch.full_like(update.state[running], 50.0)

    trainer = federate(
        module(NormNet),
        toy_data(SHAPES),
        [Bad(), CoordinateMedian()],
        max_rounds=2,
        failures=FailurePolicy(update_limit=None),
    )
    assert float(global_state(trainer)[running].abs().max()) < 10


@pytest.mark.parametrize(
    ("others", "options"),
    [
        ([FedLP()], {}),
        ([FedPer(personal=["net.3"])], {}),
    ],
)
def test_beside_methods_that_send_parts_or_keep_several_models(others, options):
    trainer = federate(module(), toy_data(SHAPES), [*others, CoordinateMedian()], max_rounds=3, **options)
    assert (
        trainer.rounds_done == 3
        and torch.cat([one.flatten() for one in global_state(trainer).values()]).isfinite().all()
    )


def test_names_with_too_few_senders_keep_their_values():
    class Parts(FederatedCallback):
        facts = Facts(changes={Change.PARTS})

        def on_send(self, client, update):
            if client.id in ("0", "1", "2"):
                update.state = {name: value for name, value in update.state.items() if not name.startswith("net.3")}

    torch.manual_seed(0)
    toy = Toy()
    with pytest.warns(
        UserWarning, match=r"2 clients sent 'net.3.weight', and CoordinateMedian needs 3: 2 entries keep"
    ):
        trainer = federate(toy, toy_data(SHAPES), [Parts(), CoordinateMedian()], max_rounds=1)
    state, before = global_state(trainer), toy.state_dict()
    assert torch.equal(state["net.3.weight"], before["net.3.weight"])
    assert not torch.equal(state["net.0.weight"], before["net.0.weight"])


@pytest.mark.parametrize(
    ("callbacks", "options", "reason"),
    [
        ([Krum(bad=2)], {}, r"Krum\(bad=2.* needs 7 clients in a round, and 5 take part"),
        ([CoordinateMedian()], {"participation": 2}, "needs 3 clients in a round, and 2 take part"),
        ([CoordinateMedian(mixing=3)], {}, "needs 7 clients"),
        (
            [CoordinateMedian(), SCAFFOLD()],
            {},
            "SCAFFOLD takes delta_c from clients, which CoordinateMedian does not judge",
        ),
        ([CoordinateMedian(), FedProto()], {}, "FedProto lets no model travel, and CoordinateMedian"),
        ([CoordinateMedian(), HeteroFL()], {}, "both claim 'reduce'"),
        ([CoordinateMedian(), FedBuff(buffer_size=2)], {"loop": Asynchronous()}, "CoordinateMedian|denominator"),
        ([CoordinateMedian(), IFCA(num_clusters=2)], {}, "IFCA takes cluster.* from clients"),
        ([CoordinateMedian(), Krum()], {}, "both claim 'reduce'"),
        (
            [CoordinateMedian(), CFL()],
            {},
            "CoordinateMedian has to judge every update before it moves a model, and CFL",
        ),
        ([CoordinateMedian(), FedGroup()], {}, "CoordinateMedian has to judge every update.*FedGroup"),
        ([NormClippedMean()], {"participation": 2}, "needs 3 clients in a round, and 2 take part"),
        ([Krum(bad=1, chosen=5)], {}, "needs 6 clients in a round, and 5 take part"),
        ([SignFlip(["nobody"])], {}, "SignFlip is to be made by client 'nobody', who is not among"),
    ],
)
def test_what_is_refused_before_round_1(callbacks, options, reason):
    with pytest.raises(ValueError, match=reason):
        make_trainer(None, callbacks, max_rounds=1, **options).fit(module(), datamodule=toy_data(SHAPES))


def test_a_resumed_run_is_the_same_under_attack(tmp_path):
    def run(name, rounds, **resume):
        callbacks = [GaussianAttack(["1"], 0.5), GeometricMedian(weighted=True)]
        trainer = make_trainer(tmp_path, callbacks, max_rounds=rounds, name=name)
        trainer.fit(module(), datamodule=toy_data(SHAPES), **resume)
        return global_state(trainer)

    whole = run("whole", 4)
    run("cut", 2)
    same(whole, run("cut", 4, resume="last"))


def test_a_client_with_most_samples_has_no_more_than_its_largest_share():
    u, weights = draws(4), torch.tensor([0.85, 0.05, 0.05, 0.05], dtype=torch.float64)
    expected = 0.4 * u[0] + 0.2 * (u[1] + u[2] + u[3])
    torch.testing.assert_close(combined(NormClippedMean(max_norm=1e9, max_share=0.4), u, weights), expected)
