"""ClientDP with discrete noise below SecureAggregation's masks, and what redone rounds of shares cost."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec

import pytest
import torch

from fedlightning.algorithm import FederatedCallback
from fedlightning.callbacks import (
    APFL,
    SCAFFOLD,
    ClientDP,
    FedAdam,
    FedPer,
    FedProx,
    Krum,
    LocalAdaptation,
    SecureAggregation,
)
from fedlightning.callbacks.shared.fixed_point import FixedPoint
from fedlightning.callbacks.shared.spending import spent_by
from fedlightning.engines.attempts import FederationError
from fedlightning.options import Processes
from tests.callbacks.test_client_dp import module
from tests.callbacks.test_secure_aggregation import Fails
from tests.helpers import Toy, close, federate, global_state, make_trainer, same, toy_data

THERE = find_spec("cryptography") is not None and find_spec("opacus") is not None
pytestmark = [
    pytest.mark.skipif(not THERE, reason="pip install opacus cryptography"),
    pytest.mark.filterwarnings("ignore"),
]
SIZES = {str(number): 16 + 8 * number for number in range(6)}


def dp(**options):
    given = {"delta": 1e-3, "noise_multiplier": 1.0, "clip": 0.5, "where": "masked", "shares": 4, "noise_seed": 3}
    return ClientDP(**given | options)


def run(callbacks, root=None, **options):
    torch.manual_seed(0)
    return federate(module(), toy_data(SIZES), callbacks, root, **{"max_rounds": 1} | options)


def told(trainer):
    return json.loads((trainer.run.path / "privacy.json").read_text())


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("method", [None, FedPer, FedProx, APFL])
def test_without_noise_to_speak_of_it_is_the_run_with_noise_at_the_server(method, order):
    beside = [] if method is None else [method()]
    masked = [*beside, dp(noise_multiplier=1e-4, clip=0.1), SecureAggregation(clip=1.0)][::order]
    at_server = [*beside, dp(noise_multiplier=1e-4, clip=0.1, where="server", shares=None)]
    found, expected = run(masked, max_rounds=2), run(at_server, max_rounds=2)
    close(global_state(found), global_state(expected), atol=3e-4)
    start = module().state_dict()
    assert any((global_state(found)[name] - start[name]).abs().max() > 5e-3 for name in start)


def test_the_mean_has_the_noise_of_those_who_came_and_nobody_else_adds_any():
    """Six clients, four shares: variance 6/4 of what is accounted for, over six."""
    plain, noisy = ([dp(noise_multiplier=z), SecureAggregation(threshold=0.6)] for z in (1e-4, 2.0))
    first, second = global_state(run(plain)), global_state(run(noisy))
    drawn = torch.cat([(second[name] - first[name]).flatten() for name in first])
    assert float(drawn.std()) == pytest.approx(2.0 * 0.5 * math.sqrt(6 / 4) / 6, rel=4 / math.sqrt(2 * len(drawn)))
    gone = global_state(run([*noisy, Fails(c1="training", c4="training")]))
    assert not torch.equal(gone["net.0.weight"], second["net.0.weight"])


def test_every_update_is_covered_by_its_client_before_it_is_masked(monkeypatch):
    seen, encode = [], FixedPoint.encode

    def encoding(point, parts, share):
        pieces = list(parts)
        seen.append(torch.cat([piece.flatten() for piece in pieces]).norm().item())
        return encode(point, pieces, share)

    monkeypatch.setattr(FixedPoint, "encode", encoding)
    trainer = run([dp(clip=0.01, noise_seed=None), SecureAggregation()])
    assert len(seen) == 6 and max(seen) <= 0.01
    secrets = {trainer.store.get(client).state["ClientDP"]["secret"] for client in SIZES}
    assert len(secrets) == 6 and trainer.server.state["ClientDP"]["secret"] not in secrets


def test_epsilon_is_the_gaussians_and_holds_against_the_server_too(tmp_path):
    trainer = run([dp(noise_seed=None), SecureAggregation()], tmp_path, max_rounds=2)
    said = told(trainer)
    assert said["private"] and said["epsilon"] == pytest.approx(dp().epsilon_after(2))
    assert "the server (it keeps to the protocol" in said["against"] and said["rounds"] == 2
    assert any("masked" in item for item in said["noised"])


def test_a_budget_ends_the_run_and_solves_for_noise(tmp_path):
    ended = run([dp(epsilon=dp().epsilon_after(2) + 1e-6), SecureAggregation()], tmp_path, max_rounds=4)
    assert ended.server.round == 1 or ended.summary["rounds"] == 2
    solved = run([dp(noise_multiplier=None, epsilon=9.0, noise_seed=None), SecureAggregation()], tmp_path / "b")
    assert told(solved)["epsilon"] <= 9.0 and told(solved)["noise_multiplier"] > 0


class Skips(Toy):
    """Takes no step with fewer than 40 samples."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.trainer.num_training_batches >= 5 else None


def test_a_client_without_a_step_brings_its_noise_and_its_weight():
    """Else the mean would be over those who took one, which tells who did, and has the noise of all."""

    def global_of(z, kind):
        torch.manual_seed(0)
        return global_state(
            federate(kind(), toy_data(SIZES), [dp(noise_multiplier=z), SecureAggregation()], max_rounds=1)
        )

    quiet, noisy, everybody = global_of(1e-4, Skips), global_of(2.0, Skips), global_of(1e-4, Toy)
    drawn = torch.cat([(noisy[name] - quiet[name]).flatten() for name in quiet])
    assert float(drawn.std()) == pytest.approx(2.0 * 0.5 * math.sqrt(6 / 4) / 6, rel=4 / math.sqrt(2 * len(drawn)))
    torch.manual_seed(0)
    start = Toy().state_dict()
    moved = [
        math.sqrt(sum(float((one[name] - start[name]).square().sum()) for name in start)) for one in (quiet, everybody)
    ]
    assert 0.2 * moved[1] < moved[0] < 0.8 * moved[1]  # three of six changes, over six


def test_clients_do_not_solve_for_other_rounds_than_are_accounted(tmp_path):
    callbacks = [[dp(noise_multiplier=None, epsilon=9.0), SecureAggregation()] for _ in range(2)]
    torch.manual_seed(0)
    make_trainer(tmp_path, callbacks[0], max_rounds=1, name="run").fit(module(), datamodule=toy_data(SIZES))
    with pytest.raises((ValueError, FederationError), match=r"solve for by max_rounds\): they were .* and are .* now"):
        make_trainer(tmp_path, callbacks[1], max_rounds=2, name="run").fit(
            module(), datamodule=toy_data(SIZES), resume="last"
        )


@pytest.mark.parametrize("step", ["training", "open"])
def test_who_drops_out_takes_his_share_along(step):
    two = {"c0": step, "c5": step}
    assert len(run([dp(), SecureAggregation(threshold=0.6), Fails(**two)]).server.failures) == 2
    with pytest.raises((ValueError, FederationError), match="opens no sum of fewer than 5"):
        run([dp(shares=5), SecureAggregation(threshold=0.8), Fails(**two)])


def test_a_client_refuses_a_sum_with_less_noise(monkeypatch):
    monkeypatch.setattr(SecureAggregation, "_needed", lambda self, server, asked: 4)
    with pytest.raises((ValueError, FederationError), match="would have less noise than 5 shares"):
        run([dp(shares=5), SecureAggregation(threshold=0.8)])


def test_a_resumed_run_and_a_round_done_again_give_the_same_bits(tmp_path):
    whole = run([dp(), SecureAggregation()], tmp_path / "whole", max_rounds=2)
    cut = make_trainer(tmp_path, [dp(), SecureAggregation()], max_rounds=1, name="cut")
    torch.manual_seed(0)
    cut.fit(module(), datamodule=toy_data(SIZES))
    again = make_trainer(tmp_path, [dp(), SecureAggregation()], max_rounds=2, name="cut")
    torch.manual_seed(0)
    again.fit(module(), datamodule=toy_data(SIZES), resume="last")
    same(global_state(again), global_state(whole))


@pytest.mark.parametrize("engine", ["vectorized", pytest.param("processes", marks=pytest.mark.slow)])
def test_every_engine_adds_the_same_noise(engine):
    engine = Processes(2) if engine == "processes" else engine
    one, other = (
        global_state(run([dp(noise_multiplier=0.1), SecureAggregation()], **options))
        for options in ({}, {"engine": engine})
    )
    close(one, other, atol=1e-5)


# -- rounds that are done again ----------------------------------------------------------------------------------------
class Once(FederatedCallback):
    """Ends a run after a release and before its state is saved; the next one goes on without a client."""

    ends, failing = True, None

    def on_send(self, client, update):
        if client.round == 1 and client.id == self.failing and client.message.work != 0:
            raise RuntimeError("no power")

    def on_round_end(self, server):
        if Once.ends and server.round == 1:
            Once.ends = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["masked", "server"])
@pytest.mark.parametrize("failing", [None, "2"])
def test_a_round_done_again_without_a_client_is_the_release_of_before(where, failing, tmp_path):
    """The difference of both means would be that client's change, with its own share of the noise."""
    Once.ends, Once.failing = True, None
    shares = {} if where == "server" else {"shares": 4}
    beside = [SecureAggregation()] if where == "masked" else []
    for goes_on in ({}, {"resume": "last"}):
        callback = dp(**{"where": where, "noise_seed": None, "shares": None} | shares)
        trainer = make_trainer(tmp_path, [callback, *beside, Once()], max_rounds=2, name="run", failures="skip")
        torch.manual_seed(0)
        try:
            trainer.fit(module(), datamodule=toy_data(SIZES), **goes_on)
        except KeyboardInterrupt:
            Once.failing = failing
            first = {name: value.clone() for name, value in trainer.server.model.items()}
    same(first, trainer.server.model)
    assert told(trainer)["rounds"] == 2
    assert told(trainer)["epsilon"] == pytest.approx(spent_by("rdp", 1e-3, ((1.0, 1.0, 2),)))


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("callbacks", "reason"),
    [
        ([dp()], "Take both, or leave out both"),
        ([dp(where="server", shares=None), SecureAggregation()], "ClientDP"),
        ([dp(shares=6), SecureAggregation()], r"opens sums of 5 of 6 clients, .* Lower shares"),
        ([dp(noise_multiplier=40.0), SecureAggregation()], r"could overflow. Take a clip of \d+"),
        ([dp(clip=9.0), SecureAggregation()], r"could overflow. Take a clip of \d+"),
        ([dp(), SecureAggregation(bits=64)], "Take bits=32"),
        ([dp(noise_multiplier=1e-6, clip=0.01), SecureAggregation(bits=16)], "Take bits=32"),
        ([SCAFFOLD(), dp(), SecureAggregation()], "SCAFFOLD"),
        ([Krum(), dp(), SecureAggregation()], "Krum"),
        ([LocalAdaptation(), dp(), SecureAggregation()], "LocalAdaptation changes or adds to what"),
    ],
)
def test_it_is_refused(callbacks, reason):
    with pytest.raises((ValueError, FederationError), match=reason):
        run(callbacks)


def test_the_clip_that_a_refusal_names_is_enough():
    with pytest.raises((ValueError, FederationError)) as refused:
        run([dp(noise_multiplier=40.0), SecureAggregation()])
    clip = float(str(refused.value).split("Take a clip of ")[1].split()[0])
    run([dp(noise_multiplier=40.0), SecureAggregation(clip=clip), FedAdam()])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"accountant": "prv"}, "Take accountant='rdp'"),
        ({"rate": 0.5}, "rate=0.5 with where='masked': a sum shows"),
        ({"quantile": 0.5}, "quantile=0.5 with where='masked': nobody covers"),
        ({"shares": None}, "where='masked' without shares"),
    ],
)
def test_options_that_contradict_each_other(options, reason):
    with pytest.raises(ValueError, match=reason):
        dp(**options)
