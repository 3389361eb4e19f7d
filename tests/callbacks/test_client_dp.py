"""ClientDP: what bounds a client, the noise, the budget, the secret, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import warnings
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("opacus", reason="ClientDP counts with Opacus: pip install opacus cryptography")

from fedlightning.algorithm import Change, Facts, FederatedCallback
from fedlightning.callbacks import (
    APFL,
    IFCA,
    SCAFFOLD,
    ClientDP,
    CoordinateMedian,
    Ditto,
    FedAdam,
    FedAvg,
    FederatedEarlyStopping,
    FedPer,
    FedProto,
    FedProx,
    GlobalCheckpoint,
    LocalCheckpoint,
    PoissonSampling,
)
from fedlightning.contract.messages import Message, Update
from fedlightning.engines.attempts import FederationError
from fedlightning.errors import ConfigurationError
from fedlightning.options import FailurePolicy
from fedlightning.privacy.release import FILE
from fedlightning.server.loop import Synchronous
from fedlightning.virtual_time import Asynchronous, SampleSpeed, VirtualClock
from tests.helpers import NormNet, Toy, federate, global_state, make_trainer, same, toy_data

pytestmark = pytest.mark.filterwarnings("ignore:ClientDP")
SIZES = {"0": 24, "1": 40, "2": 16}
TINY = 1e-12


def module(kind=Toy):
    torch.manual_seed(0)
    return kind()


def dp(**options):
    return ClientDP(**{"delta": 1e-3, "noise_multiplier": 1.0, "noise_seed": 3} | options)


# -- accounting --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rate", "noise", "rounds", "delta", "accountant", "epsilon"),
    [
        (0.04, 1.5, 2250, 1e-5, "rdp", 7.32911117143),  # Opacus, tests/accountants_test.py
        (0.04, 1.5, 2249, 1e-5, "prv", 6.777395712),
        (1e-3, 1.0, 1, 1e5**-1.1, "rdp", None),
    ],
)
def test_published_epsilons(rate, noise, rounds, delta, accountant, epsilon):
    found = ClientDP(delta=delta, noise_multiplier=noise, rate=rate, accountant=accountant).epsilon_after(rounds)
    assert found == pytest.approx(epsilon, rel=1e-6) if epsilon is not None else 0 < found < 1


def test_the_renyi_bound_without_subsampling_by_hand():
    """One Gaussian: RDP of order a is a / (2 z^2); the least over orders of the conversion of Balle et al. 2020."""
    z, rounds, delta = 10.0, 3, 1e-5
    orders = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))
    by_hand = min(
        rounds * a / (2 * z**2) - (math.log(delta) + math.log(a)) / (a - 1) + math.log((a - 1) / a) for a in orders
    )
    assert ClientDP(delta=delta, noise_multiplier=z).epsilon_after(rounds) == pytest.approx(by_hand, rel=1e-9)


def test_it_grows_with_rounds_and_rate_and_falls_with_noise():
    one = dp(rate=0.1).epsilon_after(10)
    assert one < dp(rate=0.1).epsilon_after(20)
    assert one < dp(rate=0.2).epsilon_after(10)
    assert one > dp(rate=0.1, noise_multiplier=2.0).epsilon_after(10)


# -- the bound ---------------------------------------------------------------------------------------------------------
def test_without_noise_and_clipping_it_is_uniform_fedavg():
    plain = global_state(federate(module(), toy_data(SIZES), [FedAvg(weighting="uniform")], max_rounds=3))
    private = global_state(
        federate(
            module(),
            toy_data(SIZES),
            [dp(noise_multiplier=TINY, clip=1e6)],
            max_rounds=3,
            failures=FailurePolicy(update_limit=None),
        )
    )
    torch.testing.assert_close(private, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("length", [0.0, 0.3, 5.0, 1e4])
def test_a_change_is_never_longer_than_the_limit(dtype, length):
    callback, toy = dp(clip=1.0), torch.nn.Linear(6, 3).to(dtype)
    received = {name: value.detach().clone() for name, value in toy.named_parameters()}
    draw = {name: torch.randn(value.shape, dtype=torch.float64) for name, value in received.items()}
    size = math.sqrt(sum(float(value.square().sum()) for value in draw.values()))
    moved = {name: (received[name].double() + length / size * draw[name]).to(dtype) for name in draw}
    update = Update(0, "0", state=dict(moved))
    callback.protect(SimpleNamespace(module=toy, received=received), update)
    norm = math.sqrt(
        sum(float((update.state[name].double() - received[name].double()).square().sum()) for name in received)
    )
    assert norm <= 1.0
    if length > 1.5 and dtype != torch.float16:
        assert norm == pytest.approx(1.0, abs=1e-4)
    if length == 0.3:
        assert norm == pytest.approx(0.3, rel=5e-2 if dtype == torch.float16 else 1e-4)
    server = SimpleNamespace(trainable=list(received))
    callback.check_update(server, Message(0, "0", received, tuple(received)), update)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_change_of_zeros_is_cut_below_the_limit_too(dtype):
    """Layers that start at zero (logistic regression, adapters): what is added to them is rounded by its own size."""
    callback, toy = dp(clip=0.1), torch.nn.Linear(6, 3, bias=False).to(dtype)
    torch.nn.init.zeros_(toy.weight)
    received = {"weight": toy.weight.detach().clone()}
    for seed in range(40):
        draw = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        update = Update(0, "0", state={"weight": draw.to(dtype)})
        callback.protect(SimpleNamespace(module=toy, received=received), update)
        callback.check_update(SimpleNamespace(trainable=["weight"]), Message(0, "0", received, ("weight",)), update)
        assert float(update.state["weight"].double().norm()) == pytest.approx(0.1, rel=6e-3)


def test_the_server_takes_in_nothing_longer():
    server = SimpleNamespace(trainable=["w"])
    message = Message(0, "0", {"w": torch.zeros(4), "frozen": torch.ones(1)}, ("w", "frozen"))
    with pytest.raises(ValueError, match=r"length 2, more than clip=1"):
        dp().check_update(server, message, Update(0, "0", state={"w": torch.ones(4), "frozen": torch.ones(1)}))
    with pytest.raises(ValueError, match="'frozen' has changed"):
        dp().check_update(server, message, Update(0, "0", state={"w": torch.zeros(4), "frozen": torch.zeros(1)}))


def test_one_client_moves_the_mean_by_the_limit_over_the_expected_number_at_most():
    def state(clients):
        callbacks = [dp(noise_multiplier=TINY, clip=0.05, rate=1.0)]
        return global_state(federate(module(), toy_data(clients), callbacks, max_rounds=1, local_steps=20))

    both, one = state({"0": 24, "1": 40}), state({"0": 24, "1": 0})  # the same denominator: two clients
    moved = math.sqrt(sum(float((both[name] - one[name]).double().square().sum()) for name in both))
    assert 0 < moved <= 0.05 / 2 + 1e-6


# -- the noise ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rate", [1.0, 1e-9])
def test_the_noise_has_its_variance_whoever_came(rate):
    """Also in a round that draws nobody."""
    callback = dp(rate=0.5, clip=0.2, noise_multiplier=1.5, noise_seed=None)
    server = SimpleNamespace(
        state={},
        clients=list("abcd"),
        round=0,
        run_dir=None,
        outgoing=(),
        blueprint=SimpleNamespace(privacy={}),
        trainable=["w"],
        shared_names=lambda: ("w", "unsent"),
        model={"w": torch.zeros(100, 200)},
        max_rounds=1,
    )
    callback.on_federation_start(server)
    noise = callback.on_reduced(server, {"w": torch.zeros(100, 200), "kept": torch.ones(3)})
    std = 1.5 * 0.2 / (0.5 * 4)
    assert float(noise["w"].std()) == pytest.approx(std, rel=0.03)
    assert abs(float(noise["w"].mean())) < 5 * std / math.sqrt(20_000)
    assert torch.equal(noise["kept"], torch.ones(3))
    server.round = 1
    other = callback.on_reduced(server, {"w": torch.zeros(100, 200)})["w"]
    assert abs(float(torch.corrcoef(torch.stack([noise["w"].flatten(), other.flatten()]))[0, 1])) < 0.05


def noise_of(names, before, after):
    return {name: float((after[name] - before[name]).abs().max()) for name in names}


def test_entries_that_nobody_sent_get_noise_too():
    """Else they would tell that none of those who send them took part."""

    class Parts(FederatedCallback):
        facts = Facts(changes={Change.PARTS})

        def on_send(self, client, update):
            update.state = {name: value for name, value in update.state.items() if not name.startswith("net.3")}

    trainer = federate(module(), toy_data(SIZES), [Parts(), dp()], max_rounds=1)
    before, after = module().state_dict(), global_state(trainer)
    assert all(value > 0.01 for value in noise_of(after, before, after).values())


def test_a_round_of_clients_that_are_all_late_releases_noise():
    loop = Synchronous(VirtualClock(SampleSpeed(1.0)), deadline=0.1)
    trainer = federate(module(), toy_data(SIZES), [dp()], max_rounds=1, loop=loop)
    before, after = module().state_dict(), global_state(trainer)
    assert all(value > 0.01 for value in noise_of(after, before, after).values())


def test_clients_without_samples_are_not_asked():
    """A round that drew nobody else would end the run, and tell that the others were not drawn."""
    trainer = federate(module(), toy_data({"0": 0, "1": 24}), [dp(rate=0.3)], max_rounds=6)
    assert trainer.rounds_done == 6 and not trainer.server.failures


def test_two_means_of_one_round_never_share_their_noise():
    """As where a round is done again after an interruption and a client fails: the difference would be free of noise."""
    server = SimpleNamespace(
        state={},
        clients=["a"],
        round=0,
        run_dir=None,
        outgoing=(),
        blueprint=SimpleNamespace(privacy={}),
        trainable=["w"],
        max_rounds=1,
        shared_names=lambda: ("w",),
    )
    server.model = {"w": torch.zeros(50)}
    callback = dp(noise_seed=None)
    one, same_one, other = (
        callback.on_reduced(server, {"w": value})["w"] - value for value in (torch.zeros(50),) * 2 + (torch.ones(50),)
    )
    assert torch.equal(one, same_one) and float((one - other).abs().max()) > 0.1


def test_a_round_that_draws_nobody_releases_noise():
    trainer = federate(module(), toy_data(SIZES), [dp(rate=1e-6, clip=1e-6)], max_rounds=1)
    before, after = module().state_dict(), global_state(trainer)
    assert trainer.server.costs.bytes_down == 0
    assert all(not torch.equal(before[name], after[name]) for name in after)


def test_the_secret_is_new_for_every_run_and_in_no_file_but_the_state(tmp_path):
    def run(name):
        trainer = make_trainer(tmp_path, [ClientDP(delta=1e-3, noise_multiplier=1.0)], max_rounds=2, name=name)
        trainer.fit(module(), datamodule=toy_data(SIZES))
        return trainer

    one, two = run("one"), run("two")
    secrets = [trainer.server.state["ClientDP"]["secret"] for trainer in (one, two)]
    assert secrets[0] != secrets[1] and len(secrets[0]) == 32
    assert any(not torch.equal(one.server.model[name], two.server.model[name]) for name in one.server.model)
    for path in one.run.path.rglob("*"):
        if path.is_file() and "last" not in path.parts:
            assert secrets[0].encode() not in path.read_bytes(), path


# -- the budget --------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_noise_is_solved_for_the_planned_rounds(tmp_path):
    callback = ClientDP(delta=1e-3, epsilon=4.0, rate=0.5)
    trainer = make_trainer(tmp_path, [callback], max_rounds=5)
    trainer.fit(module(), datamodule=toy_data(SIZES))
    told = json.loads((trainer.run.path / "privacy.json").read_text())
    assert trainer.rounds_done == 5 and told["rounds"] == 5 and told["private"]
    assert 3.9 < told["epsilon"] <= 4.0
    with pytest.raises(ValueError, match=r"Round 6 would spend epsilon=.* more than the budget of 4"):
        longer = make_trainer(tmp_path, [ClientDP(delta=1e-3, epsilon=4.0, rate=0.5)], max_rounds=8)
        longer.fit(module(), datamodule=toy_data(SIZES), resume="last")


def test_a_run_ends_before_the_round_that_would_exceed_it_and_a_resumed_one_too(tmp_path):
    def trainer(name, rounds=30):
        callback = ClientDP(delta=1e-3, noise_multiplier=2.0, epsilon=6.0, noise_seed=1)
        return make_trainer(tmp_path, [callback], max_rounds=rounds, name=name)

    whole = trainer("whole")
    whole.fit(module(), datamodule=toy_data(SIZES))
    callback, rounds = whole.callbacks.callbacks[0], whole.rounds_done
    assert callback.epsilon_after(rounds) <= 6.0 < callback.epsilon_after(rounds + 1)
    assert whole.summary["stopped"]["reason"] == "a further round would exceed epsilon=6"
    cut = trainer("cut")
    cut.federation = None
    with pytest.raises(KeyboardInterrupt):
        cut_at(cut, 2)
    again = trainer("cut")
    again.fit(module(), datamodule=toy_data(SIZES), resume="last")
    assert again.rounds_done == rounds
    same(again.server.model, whole.server.model)
    trainer("extended", 3).fit(module(), datamodule=toy_data(SIZES))
    extended = trainer("extended")
    extended.fit(module(), datamodule=toy_data(SIZES), resume="last")
    assert extended.summary["stopped"] == whole.summary["stopped"] and extended.rounds_done == rounds
    rows = (again.run.path / "privacy.csv").read_text().splitlines()
    assert len(rows) == 1 + rounds


def cut_at(trainer, round):
    """Break a run off in the middle of a round."""
    beat = ClientDP.on_reduced

    def broken(self, server, state):
        found = beat(self, server, state)
        if server.round == round:
            raise KeyboardInterrupt
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientDP, "on_reduced", broken)
        trainer.fit(module(), datamodule=toy_data(SIZES))


def test_what_a_round_spends_is_on_disk_before_its_model_is_there(tmp_path):
    trainer = make_trainer(tmp_path, [dp()], max_rounds=3)
    with pytest.raises(KeyboardInterrupt):
        cut_at(trainer, 1)
    assert json.loads((trainer.run.path / "privacy.json").read_text())["rounds"] == 2


def server_of(folder, max_rounds):
    return SimpleNamespace(
        state={},
        clients=["a"],
        run_dir=folder,
        outgoing=(),
        blueprint=SimpleNamespace(privacy={}),
        trainable=["w"],
        max_rounds=max_rounds,
        shared_names=lambda: ("w",),
        model={"w": torch.zeros(5)},
    )


@pytest.mark.parametrize("differs", [False, True])
def test_a_round_that_was_released_is_replayed_and_never_released_again(tmp_path, differs):
    callback, server, released = dp(noise_seed=None), server_of(tmp_path, 9), {}
    for round, value in ((0, 0.0), (1, 1.0), (1, 2.0 if differs else 1.0), (2, 3.0)):
        server.round = round
        found = callback.on_reduced(server, {"w": torch.full((5,), value)})["w"]
        assert torch.equal(found, released.setdefault(round, found))
    told = json.loads((tmp_path / "privacy.json").read_text())
    assert told["rounds"] == 3
    assert told["epsilon"] == pytest.approx(callback.epsilon_after(3))
    assert len((tmp_path / "privacy.csv").read_text().splitlines()) == 4


def test_a_release_without_an_entry_is_discarded_and_an_entry_without_its_release_ends_the_run(tmp_path, monkeypatch):
    """It is stored first: killed before the entry, a run has told nobody, and makes another one."""
    callback, server = dp(noise_seed=None), server_of(tmp_path, 9)
    server.round = 0
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ClientDP, "_spend", lambda *values: (_ for _ in ()).throw(KeyboardInterrupt))
        callback.on_reduced(server, {"w": torch.zeros(5)})
    assert (tmp_path / FILE).exists() and not (tmp_path / "privacy.csv").exists()
    callback.on_reduced(server, {"w": torch.ones(5)})
    assert json.loads((tmp_path / "privacy.json").read_text())["rounds"] == 1
    (tmp_path / FILE).unlink()
    with pytest.raises(ValueError, match=r"Round 1 was released before.*comes out differently now"):
        callback.on_reduced(server, {"w": torch.zeros(5)})
    callback.on_reduced(server, {"w": torch.ones(5)})  # the same bits are the same release


def test_releases_do_not_exceed_the_budget(tmp_path):
    callback = dp(noise_seed=None, noise_multiplier=2.0, epsilon=dp(noise_multiplier=2.0).epsilon_after(2) + 1e-6)
    server = server_of(tmp_path, 2)
    with pytest.raises(ValueError, match=r"Round 3 would spend .* more than the budget"):
        for round in range(3):
            server.round = round
            callback.on_reduced(server, {"w": torch.zeros(5)})


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({}, {"rate": 0.1}, "one noise_multiplier, rate and noise_seed"),
        ({}, {"noise_multiplier": 5.0}, "one noise_multiplier, rate and noise_seed"),
        ({}, {"noise_seed": None}, "one noise_multiplier, rate and noise_seed"),
        (None, {}, "1 rounds were without ClientDP"),
    ],
)
def test_a_resumed_run_cannot_change_what_was_accounted_for(tmp_path, first, second, reason):
    begun = [FedAvg(weighting="uniform")] if first is None else [dp(**first)]
    make_trainer(tmp_path, begun, max_rounds=1, name="run").fit(module(), datamodule=toy_data(SIZES))
    again = make_trainer(tmp_path, [dp(**second)], max_rounds=2, name="run")
    with pytest.raises(ValueError, match=reason):
        again.fit(module(), datamodule=toy_data(SIZES), resume="last", allow_config_change=True)


# -- beside others -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "others", [[FedProx(mu=0.1)], [FedAdam()], [FedPer(personal=["net.3"])], [Ditto()], [APFL()]], ids=str
)
def test_methods_that_it_covers(others):
    trainer = federate(module(), toy_data(SIZES), [*others, dp(clip=0.1)], max_rounds=2)
    assert trainer.rounds_done == 2 and all(value.isfinite().all() for value in global_state(trainer).values())


def test_a_layer_that_stays_gets_no_noise():
    trainer = federate(module(), toy_data(SIZES), [FedPer(personal=["net.3"]), dp(noise_multiplier=1e4)], max_rounds=1)
    personal = trainer.store.get("0").personal
    assert set(personal) == {"net.3.weight", "net.3.bias"} and float(personal["net.3.weight"].abs().max()) < 10
    assert float(global_state(trainer)["net.0.weight"].abs().max()) > 100


@pytest.mark.parametrize(
    ("callbacks", "options", "kind", "reason"),
    [
        ([dp(), SCAFFOLD()], {}, Toy, "SCAFFOLD"),
        ([dp(), FedProto()], {}, Toy, "FedProto"),
        ([dp(), IFCA(num_clusters=2)], {}, Toy, "IFCA"),
        ([dp(), CoordinateMedian()], {}, Toy, "CoordinateMedian"),
        ([dp(), LocalCheckpoint()], {}, Toy, "gives no client's score away.*LocalCheckpoint|LocalCheckpoint"),
        ([dp(), GlobalCheckpoint()], {}, Toy, "GlobalCheckpoint"),
        ([dp(), FederatedEarlyStopping()], {"evaluation": 1}, Toy, "FederatedEarlyStopping"),
        ([dp(), PoissonSampling(0.5)], {}, Toy, "both claim 'participants'"),
        ([dp(), FedAvg(weighting="samples")], {}, Toy, "ask for different weightings"),
        ([dp()], {"participation": 2}, Toy, "both say who takes part"),
        ([dp()], {"participation": 1}, Toy, "participation=1 draws a fixed number of clients"),
        ([dp()], {}, NormNet, "is a running statistic that travels"),
        ([dp()], {"loop": Asynchronous()}, Toy, "ClientDP"),
        ([dp()], {"loop": Synchronous(VirtualClock(SampleSpeed(1.0)), first=2)}, Toy, "first=2 takes in as many"),
        ([dp()], {"precision": "bf16-true"}, Toy, "is torch.bfloat16, and ClientDP covers"),
        (
            [ClientDP(delta=1e-3, noise_multiplier=0.1, epsilon=0.1)],
            {},
            Toy,
            "Round 1 would spend epsilon=.* Raise noise_multiplier",
        ),
    ],
)
def test_what_is_refused_before_round_1(callbacks, options, kind, reason):
    with pytest.raises(ValueError, match=reason):
        make_trainer(None, callbacks, **{"max_rounds": 1} | options).fit(module(kind), datamodule=toy_data(SIZES))


def test_batchnorm_that_stays_with_the_clients_is_right():
    trainer = make_trainer(None, [dp(clip=0.1)], max_rounds=1, float_buffers="local")
    trainer.fit(module(NormNet), datamodule=toy_data(SIZES))
    assert trainer.rounds_done == 1


def test_a_clip_below_the_rounding_is_refused():
    with pytest.raises(FederationError, match="is within the rounding of the model's entries"):
        federate(module(), toy_data(SIZES), [dp(clip=1e-9)], max_rounds=1)


def test_neither_noise_nor_epsilon():
    with pytest.raises(ValueError, match="neither noise_multiplier nor epsilon"):
        ClientDP(delta=1e-5)


def test_a_fixed_seed_is_not_private(tmp_path):
    trainer = make_trainer(tmp_path, [dp()], max_rounds=1)
    with pytest.warns(UserWarning, match="This run is not private"):
        trainer.fit(module(), datamodule=toy_data(SIZES))
    told = json.loads((trainer.run.path / "privacy.json").read_text())
    assert told["private"] is False and told["epsilon"] is None


def test_the_sum_is_divided_by_the_expected_number_of_participants(monkeypatch):
    """Whoever came: the only participant's change counts as one over half of the clients."""
    monkeypatch.setattr(ClientDP, "participants", lambda self, server: ["1"])
    private = [dp(noise_multiplier=TINY, clip=1e6, rate=0.5)]
    found = global_state(
        federate(module(), toy_data(SIZES), private, max_rounds=1, failures=FailurePolicy(update_limit=None))
    )
    alone = global_state(federate(module(), toy_data({"1": SIZES["1"]}), [FedAvg()], max_rounds=1))
    before = module().state_dict()
    for name, value in found.items():
        expected = before[name] + (alone[name] - before[name]) / (0.5 * len(SIZES))
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-4)


def test_a_ledger_counts_the_rounds_of_all_runs(tmp_path):
    def run(name, **options):
        callback = dp(noise_seed=None, ledger=str(tmp_path / "ledger"), **options)
        trainer = make_trainer(tmp_path, [callback], max_rounds=2, name=name)
        trainer.fit(module(), datamodule=toy_data(SIZES))
        return json.loads((trainer.run.path / "privacy.json").read_text())["epsilon"]

    first, second = run("first"), run("second")
    assert first == pytest.approx(dp().epsilon_after(2)) and second == pytest.approx(dp().epsilon_after(4))
    assert run("third", epsilon=dp().epsilon_after(5) * 1.001) == pytest.approx(dp().epsilon_after(5))  # one round more
    with pytest.raises(ValueError, match=r"Round 1 would spend epsilon=.* Raise noise_multiplier"):
        run("fourth", epsilon=dp().epsilon_after(5) * 1.001)


class Adds(FederatedCallback):
    """Makes every change long, before and after everybody else."""

    def __init__(self, rank):
        self.rank = rank

    def on_send(self, client, update):
        update.state = {name: value + 100.0 for name, value in update.state.items()}


@pytest.mark.parametrize("rank", [-2000, 2000])
def test_no_callback_gets_an_update_after_it_was_clipped(rank):
    fitted = module()
    before = {name: value.clone() for name, value in fitted.state_dict().items()}
    tiny = dp(noise_multiplier=TINY, clip=0.05)
    trainer = federate(fitted, toy_data([16] * 4), [tiny, Adds(rank)], max_rounds=1)
    moved = sum(float((value - before[name]).double().square().sum()) for name, value in global_state(trainer).items())
    assert 0.04 < moved**0.5 <= 0.05 + 1e-6


def test_nothing_goes_by_lengths_that_have_no_noise_or_writes_them(tmp_path):
    """One client is a thousand times as long as others: whether it counts must not depend on them."""

    class Long(FederatedCallback):
        rank = -5

        def on_send(self, client, update):
            long = 1e6 if client.id == "0" else 1e-6
            update.state = {name: client.received[name] + long for name in update.state}

    tiny = dp(noise_multiplier=TINY, clip=1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has the norm")
        trainer = federate(module(), toy_data([16] * 4), [tiny, Long()], tmp_path, max_rounds=3)
    assert "warnings" not in json.loads((trainer.run.path / "summary.json").read_text())
    parts = {part.key: part.state() for part in trainer.server.parts if part.key in ("norms", "explosions")}
    assert parts == {"norms": {}, "explosions": {"usual": {}, "warnings": []}}
    with pytest.raises(ConfigurationError, match="update_limit=3 goes by single updates, which ClientDP hides"):
        federate(module(), toy_data([16] * 4), [dp()], max_rounds=1, failures=FailurePolicy(update_limit=3.0))


def test_who_knows_the_participants_reads_an_epsilon_without_amplification(tmp_path):
    drawn = ClientDP(delta=1e-3, noise_multiplier=1.0, rate=0.5)
    with pytest.warns(UserWarning, match="against who knows who took part") as said:
        trainer = federate(module(), toy_data([16] * 6), [drawn], tmp_path, max_rounds=3)
    told = json.loads((trainer.run.path / "privacy.json").read_text())
    everybody = ClientDP(delta=1e-3, noise_multiplier=1.0).epsilon_after(3)
    assert told["epsilon"] == pytest.approx(drawn.epsilon_after(3)) and told["epsilon"] < everybody
    assert told["epsilon_participants_known"] == pytest.approx(everybody)
    with (trainer.run.path / "privacy.csv").open() as rows:
        last = list(csv.DictReader(rows))[-1]
    assert float(last["epsilon_participants_known"]) == pytest.approx(everybody)
    assert any(f"{everybody:.4g}" in str(one.message) for one in said)
