"""AFL: sheet C 15."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn import functional as F

from fedlightning import FederatedCallback
from fedlightning.algorithm import Change, Facts
from fedlightning.callbacks import AFL, IFCA, FedAdam, FedAvg, FedBABU, FedPer, FedProx, GlobalCheckpoint, MaxFL
from fedlightning.callbacks.afl import nearest_shares
from fedlightning.cli import main
from fedlightning.tensors import module_state
from tests.callbacks.common import FailsOnce, Plain, absent_clients_rest, cut_and_resumed, fixed_data, start_of
from tests.conformance.case import Case, Kept
from tests.datamodules.images.test_idx import write_mnist
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    close,
    differs,
    federate,
    global_state,
    quadratic_data,
    same,
    spied,
    toy_data,
)

CONFIGS = Path(__file__).parents[2] / "configs"
CASES = {
    "AFL": Case(AFL(gamma=0.3), neutral=AFL(gamma=0.0, report="last")),
    "AFL last": Case(AFL(gamma=0.3, start="samples", report="last"), neutral=AFL(gamma=0.0, report="last")),
}
KEPT = {"AFL": Kept("AFL", server=("count", "lambda", "mean"))}

A = [[1.0, 2.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
B = [[1.0, 2.0, 1.0], [0.8, 1.5, 1.0], [1.0, -1.0, 0.2]]


def loss(i, w):
    return 0.5 * (np.array(A[i]) * (w - np.array(B[i])) ** 2).sum()


def steps(i, w, count, lr=0.1):
    for _ in range(count):
        w = w - lr * np.array(A[i]) * (w - np.array(B[i]))
    return w


def projected(v):
    """The nearest point of the simplex by bisection on the threshold, not by sorting."""
    v = np.asarray(v, dtype=float)
    low, high = v.min() - 1.0, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(v - low, 0)


# -- the projection ----------------------------------------------------------------------------------------------------
def test_the_sheets_numbers():
    moved = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64) + 0.1 * torch.tensor([1.0, 2.0, 4.0])
    assert nearest_shares(moved).tolist() == pytest.approx([0.366667, 0.266667, 0.366667], abs=1e-6)


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_the_projection_is_the_nearest_point(count):
    draw = np.random.default_rng(count)
    for scale in (1e-3, 1.0, 1e3):
        v = scale * draw.standard_normal(count)
        found = nearest_shares(torch.from_numpy(v)).numpy()
        np.testing.assert_allclose(found, projected(v), atol=1e-9 * max(1, scale))
        assert (found >= 0).all()
        assert found.sum() == pytest.approx(1.0, abs=1e-12)
        if count == 5 and scale == 1.0:
            limits, whole = [(0, 1)] * count, {"type": "eq", "fun": lambda x: x.sum() - 1}
            best = minimize(
                lambda x, v=v: ((x - v) ** 2).sum(), np.full(count, 1 / count), bounds=limits, constraints=whole
            )
            np.testing.assert_allclose(found, best.x, atol=1e-5)


@pytest.mark.parametrize("shares", [[0.25] * 4, [0.7, 0.3, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
def test_equal_losses_leave_the_shares(shares):
    given = torch.tensor(shares, dtype=torch.float64)
    held = given > 0
    torch.testing.assert_close(nearest_shares(given + 0.0), given, atol=1e-15, rtol=0)
    torch.testing.assert_close(nearest_shares(torch.where(held, given + 3.0, given)), given, atol=1e-12, rtol=0)
    torch.testing.assert_close(nearest_shares(torch.full((3,), 1e9)), torch.full((3,), 1 / 3))


# -- federations by hand ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("gamma", "report"), [(0.05, "mean"), (0.5, "last"), (5.0, "mean")])
def test_rounds_by_hand(gamma, report):
    trainer, spy = spied(Quadratic(), quadratic_data(A, B), [AFL(gamma, report=report)], max_rounds=5, local_epochs=2)
    w, shares, models = np.zeros(3), np.full(3, 1 / 3), []
    for number in range(5):
        losses = np.array([loss(i, w) for i in range(3)])
        w = w + sum(shares[i] * (steps(i, w, 2) - w) for i in range(3))
        shares = projected(shares + gamma * losses)
        models.append(w)
        np.testing.assert_allclose(spy.rounds[number]["w"], w, atol=1e-12)
        found = trainer.server.state["AFL"]["lambda"] if number == 4 else None
    assert list(found.values()) == pytest.approx(shares.tolist(), abs=1e-9)
    deployed = module_state(trainer.server.global_module())["w"]
    np.testing.assert_allclose(deployed, np.mean(models, 0) if report == "mean" else w, atol=1e-12)
    np.testing.assert_allclose(module_state(trainer.module("1"))["w"], deployed, atol=1e-12)


@pytest.mark.parametrize("start", ["uniform", "samples"])
def test_a_federation_by_hand(start):
    """Three of five clients take part, one fails once; losses and steps in plain torch."""
    data, module, sizes = fixed_data([16, 24, 10, 8, 20], worlds=2), start_of(Toy), np.array([16, 24, 10, 8, 20])
    with pytest.warns(UserWarning, match="'1' failed"):
        _, spy = spied(
            module,
            data,
            [AFL(0.2, start=start), FailsOnce("1", 0), FailsOnceMore("1", 2)],
            max_rounds=5,
            participation=3,
        )
    w, shares = module_state(module), sizes / sizes.sum() if start == "samples" else np.full(5, 0.2)
    for number in range(5):
        came = list(spy.of_round(number))
        moved, total, sums = shares.copy(), sum(shares[int(c)] for c in came), dict.fromkeys(w, 0.0)
        for client in came:
            x, y = data.tensors[client]["train"]
            moved[int(client)] += 0.2 * 5 / len(came) * float(F.cross_entropy(Plain(w)(x), y))
            trained = Plain(w).trained(x, y)
            sums = {n: sums[n] + shares[int(client)] * trained[n].detach() for n in w}
        w = {n: v / total for n, v in sums.items()} if total > 0 else w
        shares = projected(moved)
        close(spy.rounds[number], w, atol=1e-9)


class FailsOnceMore(FailsOnce):
    """The same in another round."""


def test_fixed_shares_are_fedavg():
    for make in (lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")):
        module = make()
        plain = federate(module, toy_data(), [FedAvg("uniform")], max_rounds=3)
        ours = federate(module, toy_data(), [AFL(gamma=0.0, report="last")], max_rounds=3)
        close(global_state(ours), global_state(plain), atol=1e-7)
        assert ours.server.costs.bytes_up == plain.server.costs.bytes_up
    by_size = federate(module, toy_data(), [AFL(gamma=0.0, start="samples", report="last")], max_rounds=3)
    close(global_state(by_size), global_state(federate(module, toy_data(), max_rounds=3)), atol=1e-7)


@pytest.mark.slow
def test_two_that_disagree_meet_in_the_middle():
    """(w-1)^2 with nine parts of the data and (w+1)^2 with one: w goes to 0, where both have the same loss; FedAvg to 0.8."""
    data = quadratic_data([[2.0], [2.0]], [[1.0], [-1.0]])
    data.tensors["0"] = {split: [t.repeat(9, 1) for t in parts] for split, parts in data.tensors["0"].items()}
    module, options = Quadratic(lr=0.05, size=1), {"max_rounds": 100, "sanity_check": False}
    data.batch_size = 16
    ours = federate(module, data, [AFL(0.1, start="samples")], **options)
    assert list(ours.server.state["AFL"]["lambda"].values()) == pytest.approx([0.5, 0.5], abs=0.03)
    assert float(global_state(ours)["w"]) == pytest.approx(0.0, abs=0.03)
    assert float(module_state(ours.server.global_module())["w"]) == pytest.approx(0.0, abs=0.05)
    plain = federate(module, data, [FedAvg()], **{**options, "max_rounds": 60})
    assert float(global_state(plain)["w"]) == pytest.approx(0.8, abs=1e-2)


def test_participants_without_a_share_leave_the_model():
    """Client 2 has no share; where it takes part alone the model stays, its loss counts, and the mean gets no model."""
    callback = AFL(gamma=10.0)
    trainer, spy = spied(Toy("sgd"), toy_data(), [callback], max_rounds=8, participation=1)
    stood = 0
    before = spy.messages[0].state
    shares = dict.fromkeys("012", 1 / 3)
    for number in range(8):
        (client,) = spy.of_round(number)
        if shares[client] == 0.0:
            same(spy.rounds[number], before)
            stood += 1
        else:
            same(spy.rounds[number], spy.of_round(number)[client].state)
        before = spy.rounds[number]
        added = 10.0 * 3 * float(spy.of_round(number)[client].extras["AFL"]["loss"])
        moved = [share + (added if one == client else 0.0) for one, share in shares.items()]
        shares = dict(zip("012", projected(moved), strict=True))
    assert stood
    assert trainer.server.state["AFL"]["count"] == 8 - stood


# -- what is deployed, sent, kept ---------------------------------------------------------------------------------------
def test_the_mean_is_scored_exported_and_deployed(tmp_path):
    """Stages G and L1 score the mean; training goes on from the last model."""
    trainer, spy = spied(
        NormNet("sgd"), toy_data(), [AFL(), GlobalCheckpoint(monitor="val_loss")], tmp_path, max_rounds=3
    )
    mean = {
        name: (sum(state[name].double() for state in spy.rounds) / 3).float() if v.is_floating_point() else v
        for name, v in spy.rounds[-1].items()
    }
    close(module_state(trainer.server.global_module()), mean)
    for client in "012":
        close(module_state(trainer.module(client)), mean)
    exported = torch.load(trainer.run.path / "checkpoints/global.ckpt", weights_only=True)["state_dict"]
    assert exported.keys() == mean.keys()
    assert differs(mean, global_state(trainer))
    for message in spy.messages:
        if message.round and message.work is None:
            same(message.state, spy.rounds[message.round - 1])


def test_what_is_sent_and_who_is_absent():
    trainer, spy = spied(Toy("sgd"), toy_data(), [AFL()], max_rounds=4, participation=2)
    absent_clients_rest(spy)
    assert all(set(update.extras["AFL"]) == {"loss"} for update in spy.updates)
    assert not any(message.extras for message in spy.messages)
    state = sum(v.numel() * v.element_size() for v in global_state(trainer).values())
    assert trainer.server.costs.bytes_up == len(spy.updates) * (state + 8)


def test_resumed_is_uninterrupted(tmp_path):
    whole, _, again = cut_and_resumed(tmp_path, NormNet("sgd"), toy_data(), lambda: [AFL()], max_rounds=3)
    same(global_state(whole), global_state(again))
    same(module_state(whole.server.global_module()), module_state(again.server.global_module()))
    assert whole.server.state["AFL"]["lambda"] == again.server.state["AFL"]["lambda"]


def test_clients_without_samples_have_no_share():
    trainer, spy = spied(Toy("sgd"), toy_data((24, 0, 16)), [AFL(gamma=0.0)], max_rounds=1)
    assert AFL().shares(trainer.server) == {"0": 0.5, "1": 0.0, "2": 0.5}
    halves = [spy.of_round(0)[c].state for c in "02"]
    close(spy.rounds[0], {n: (halves[0][n] + halves[1][n]) / 2 for n in halves[0]}, atol=1e-7)


def test_it_composes_with_terms_server_optimizers_and_own_heads():
    module = Toy("sgd")
    plain = global_state(federate(module, toy_data(), [AFL(report="last")], max_rounds=2))
    for others in ([FedProx(0.5)], [FedAdam()], [FedPer()]):
        _, spy = spied(module, toy_data(), [AFL(report="last"), *others], max_rounds=2)
        assert differs(spy.rounds[-1], plain)
    trainer = federate(module, toy_data(), [AFL(), FedPer()], max_rounds=2)
    assert trainer.server.global_module() is None


class Merging(FederatedCallback):
    facts = Facts(changes={Change.START})


class Reducing(FederatedCallback):
    def reduce(self, server, updates):
        return {}


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            Merging(),
            "by its loss at the model that all are sent, and Merging makes the model that training starts from",
        ),
        (Reducing(), "and Reducing combines updates in a way of its own"),
        (IFCA(init=0.1, weighting=None), "both claim 'global_module'|IFCA has a model of its own"),
        (MaxFL(), "ask for different weightings|plans rounds|both claim"),
        (FedAvg("samples"), "ask for different weightings"),
        (FedAdam(), "both claim 'server_step'"),
        (FedBABU(weighting=None), "both claim 'global_module'|has a model of its own"),
    ],
)
def test_what_has_no_one_model_is_refused(other, match):
    with pytest.raises(ValueError, match=match):
        federate(Toy(), toy_data(), [AFL(), other])


class Manual(Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().step()


def test_manual_optimization_is_refused():
    with pytest.raises(ValueError, match="AFL weighs clients by the loss that training_step returns, but Manual"):
        federate(Manual(), toy_data(), [AFL()])


@pytest.mark.parametrize("options", [{"gamma": -1.0}, {"start": "log"}, {"report": "best"}])
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=f"AFL got {next(iter(options))}="):
        AFL(**options)


@pytest.mark.parametrize("method", ["afl", "qfedavg"])
@pytest.mark.slow
def test_the_setting_in_which_it_is_compared_with_q_fedavg(method, tmp_path):
    """Three classes, one at each client, as a configuration; on a few random images."""
    write_mnist(tmp_path / "data")
    words = [f"--config={CONFIGS / name}.yaml" for name in ("fairness/three_classes", f"algorithms/{method}")]
    given = {"data.root": tmp_path / "data", "data.download": "false", "trainer.default_root_dir": tmp_path / "runs"}
    given |= {"trainer.max_rounds": 3, "trainer.logger": "false", "trainer.enable_progress_bar": "false"}
    assert main(["fit", *words, *(f"--{name}={value}" for name, value in given.items())]) == 0
    (run,) = (tmp_path / "runs").glob("*/version_0")
    assert method in [name.lower() for name in json.loads((run / "summary.json").read_text())["callbacks"]]
