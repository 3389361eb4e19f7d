"""ClientDP with a clip that adapts, and its options."""

from __future__ import annotations

import copy
import json
import math
import warnings
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("opacus", reason="ClientDP counts with Opacus: pip install opacus cryptography")

from fedlightning.algorithm import FederatedCallback, OutgoingItem
from fedlightning.callbacks import FedAvg, client_dp
from fedlightning.callbacks.client_dp import next_clip, noise_of_changes, noise_of_count
from fedlightning.callbacks.shared.secret_noise import with_noise
from fedlightning.contract.messages import Update
from fedlightning.engines.attempts import FederationError
from fedlightning.testing.toys import ToyData, ToyModule
from tests.callbacks.test_client_dp import SIZES, dp, module
from tests.conformance.case import collect
from tests.helpers import global_state, make_trainer, same, toy_data

pytestmark = pytest.mark.filterwarnings("ignore:ClientDP")


# -- adaptive clipping -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_without_noise_the_clip_becomes_the_quantile(quantile):
    lengths = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(3.0).exp()
    clip = 0.1
    for _ in range(800):
        count = float(((lengths <= clip).double() - 0.5).sum())
        clip = next_clip(clip, count, len(lengths), quantile, 0.2)
    assert clip == pytest.approx(float(lengths.quantile(quantile)), rel=0.02)


def test_the_step_is_the_papers():
    """Andrew et al. 2021, algorithm 1, written with the fraction itself in place of centred bits."""
    within, absent, expected = 7, 0, 12
    by_paper = 0.3 * math.exp(-0.2 * (within / expected - 0.5))
    count = within * 0.5 + (expected - within) * -0.5
    assert next_clip(0.3, count, expected + absent, 0.5, 0.2) == pytest.approx(by_paper, rel=1e-12)
    assert next_clip(0.3, -6.0, 12, 0.5, 0.2) > 0.3 > next_clip(0.3, 6.0, 12, 0.5, 0.2)  # all longer: it grows


@pytest.mark.parametrize(("z", "of_count"), [(0.7, 5.0), (1.5, 2.0), (3.0, 3.0)])
def test_changes_and_count_spend_together_what_z_says(z, of_count):
    """The Rényi divergence of a Gaussian of order a is a (distance / deviation)^2 / 2: those of both noises add up."""
    changes = noise_of_changes(z, of_count)
    assert (1.0 / changes) ** 2 + (0.5 / of_count) ** 2 == pytest.approx((1.0 / z) ** 2, rel=1e-12)
    assert noise_of_count(z, 1000) == 50 and noise_of_changes(z, noise_of_count(z, 3)) <= 1.16 * z


def reduced(callback, came, **options):
    """Return the noise of a round of a hundred clients, and the server."""
    server = SimpleNamespace(
        **{"state": {}, "clients": [str(i) for i in range(100)], "round": 0, "run_dir": None, "outgoing": ()} | options,
        blueprint=SimpleNamespace(privacy={}),
        trainable=["w"],
        model={"w": torch.zeros(100, 200)},
        max_rounds=9,
        shared_names=lambda: ("w",),
    )
    callback.on_federation_start(server)
    for within in came:
        extras = {} if within is None else {"ClientDP": {"within": torch.tensor(within)}}
        callback.on_update(server, Update(0, "0", extras=extras))
    return callback.on_reduced(server, {"w": torch.zeros(100, 200)})["w"], server


def test_changes_get_the_rest_of_the_noise_at_the_clip_of_their_round():
    callback = dp(rate=0.5, clip=0.2, noise_multiplier=1.5, noise_seed=None, quantile=0.5)
    noise, server = reduced(callback, [1] * 40 + [0] * 10)
    std = noise_of_changes(1.5, 50 / 20) * 0.2 / 50
    assert float(noise.std()) == pytest.approx(std, rel=0.03)
    assert server.state["ClientDP"]["clip"] != 0.2


def test_every_entry_has_noise_of_its_own():
    """Equal noise on two entries would cancel in their difference."""
    same_shape = {name: torch.zeros(500, dtype=torch.float64) for name in ("a", "b")}
    found = with_noise(same_shape, 1.0, "a secret", "round 1")
    assert abs(float(torch.corrcoef(torch.stack([found["a"], found["b"]]))[0, 1])) < 0.2
    assert not torch.equal(found["a"], with_noise(same_shape, 1.0, "a secret", "round 1", "another sum")["a"])


def test_the_count_has_noise_of_its_deviation():
    found = []
    for seed in range(400):
        callback = dp(clip=1.0, noise_multiplier=1.0, noise_seed=seed, quantile=0.5, clip_lr=1.0)
        state = {"ClientDP": callback_state(callback)}
        server = SimpleNamespace(
            state=state,
            clients=range(100),
            round=0,
            run_dir=None,
            outgoing=(),
            blueprint=SimpleNamespace(privacy={}),
            trainable=[],
            model={},
            max_rounds=1,
        )
        server.shared_names = lambda: ()
        callback.on_reduced(server, {})
        found.append(-math.log(state["ClientDP"]["clip"]) * 100)
    assert torch.tensor(found).std() == pytest.approx(5.0, rel=0.15) and abs(sum(found) / 400) < 1.0


def callback_state(callback):
    server = SimpleNamespace(state={}, round=0, max_rounds=1)
    callback._own(server)
    return server.state["ClientDP"]


def test_epsilon_is_that_of_a_fixed_clip(tmp_path):
    def told(name, **options):
        trainer = make_trainer(tmp_path, [dp(noise_seed=None, **options)], max_rounds=2, name=name)
        trainer.fit(module(), datamodule=toy_data(SIZES))
        return json.loads((trainer.run.path / "privacy.json").read_text())

    fixed, adaptive = told("fixed"), told("adaptive", quantile=0.5)
    assert fixed["epsilon"] == adaptive["epsilon"] and "'within' of ClientDP (in each visit)" in adaptive["noised"]


def test_clients_clip_to_what_the_server_found_and_a_resumed_run_goes_on(tmp_path):
    class Look(FedAvg):
        seen = []

        def on_round_end(self, server):
            self.seen.append(server.state["ClientDP"]["clip"])

    def run(rounds, name, **options):
        Look.seen = []
        callbacks = [Look(weighting="uniform"), dp(quantile=0.5, clip=1e-3, clip_lr=1.0)]
        trainer = make_trainer(tmp_path, callbacks, max_rounds=rounds, name=name)
        trainer.fit(module(), datamodule=toy_data(SIZES), **options)
        return trainer, Look.seen

    whole, clips = run(3, "whole")
    assert len(set(clips)) == 3
    run(1, "cut")
    again, _ = run(3, "cut", resume="last")
    same(global_state(again), global_state(whole))
    assert again.server.state["ClientDP"] == whole.server.state["ClientDP"]


class Cut(FederatedCallback):
    """Ends a run before its second round, once."""

    cut = True

    def on_round_start(self, server):
        if Cut.cut and server.round == 1:
            Cut.cut = False
            raise KeyboardInterrupt


def cut_and_resumed(tmp_path, first, second, rounds=(2, 2), **options):
    """Return the server of a run that was cut after a round, and goes on with other options."""
    Cut.cut = True
    for place, callback in enumerate((first, second)):
        trainer = make_trainer(tmp_path, [Cut(), callback], max_rounds=rounds[place], name="cut")
        given = {"resume": "last", **options} if place else {}
        try:
            trainer.fit(module(), datamodule=toy_data(SIZES), **given)
        except KeyboardInterrupt:
            assert not place
    return trainer.server


def test_a_resumed_run_with_another_clip_has_the_noise_of_that_clip(tmp_path, monkeypatch):
    stds = []
    monkeypatch.setattr(client_dp, "with_noise", lambda values, std, *others: stds.append(std) or values)
    cut_and_resumed(tmp_path, dp(clip=0.1), dp(clip=5.0), allow_config_change=True)
    assert stds == pytest.approx([0.1 / 3, 5.0 / 3])


# -- who takes part, and what leaves ------------------------------------------------------------------------------------
def test_other_participants_are_drawn_in_every_round():
    callback, kept = dp(rate=0.5), {}
    clients = [str(one) for one in range(40)]
    drawn = set()
    for round in range(3):
        server = SimpleNamespace(state=kept, round=round, max_rounds=9, clients=clients)
        server.is_reachable, server.num_samples = lambda client: True, dict.fromkeys(clients, 1)
        drawn.add(tuple(callback.participants(server)))
    assert len(drawn) == 3


@pytest.mark.parametrize("scores", ["withheld", "in the clear"])
def test_logged_values_go_with_scores_and_others_extras_are_in_the_clear(scores):
    kinds = {"entries": "noised", "logged": scores, "scores": scores, "extra": "in the clear", "models": "in the clear"}
    assert {kind: dp(scores=scores).covers(OutgoingItem(kind, owner="Other")) for kind in kinds} == kinds
    assert dp(scores=scores).covers(OutgoingItem("extra", owner="ClientDP")) == "noised"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"where": "client", "shares": 4}, "where='client'. Use 'server' or 'masked'"),
        ({"shares": 4}, "shares=4 without where='masked'"),
    ],
)
def test_options_that_contradict_each_other(options, reason):
    with pytest.raises(ValueError, match=reason):
        dp(**options)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(collect("CASES")))
def test_every_method_is_covered_or_refused_before_round_1(name, tmp_path):
    """Nothing fails later, and of what other callbacks send nothing leaves in the clear."""
    case, wanted = collect("CASES")[name], ("participation", "loop", "engine", "optimizer_state", "local_epochs")
    given = {key: value for key, value in case.arguments.items() if key in wanted}
    given |= {} if "local_epochs" in given else {"local_steps": 2}
    callback = dp(clip=0.1, quantile=0.5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            trainer = make_trainer(tmp_path, [copy.deepcopy(case.algorithm), callback], max_rounds=2, **given)
            trainer.fit(ToyModule(), ToyData())
        except FederationError as error:
            pytest.fail(f"{name} was let in, and failed: {error}")
        except ValueError:
            return
    assert [str(one.message) for one in said if " failed: " in str(one.message)] == []
    clear = [item for item in trainer.server.outgoing if callback.covers(item) == "in the clear"]
    assert {item.owner for item in clear} <= {""}
