"""Fed-ET: algorithms-2, entry 2.13."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import FedAdam, FedAvg, FedET, FedPer, FedProx, GlobalCheckpoint, LocalCheckpoint
from fedlightning.callbacks.fedet import confidence, lessons
from fedlightning.models import ClientModels
from fedlightning.options import Processes
from fedlightning.tensors import module_state
from tests.callbacks.public import Deep, own_models, public_data, resumed
from tests.conformance.case import Case, Kept
from tests.helpers import CLASSES, FEATURES, NormNet, Toy, close, differs, federate, same, spied, toy_data

CASES = {"FedET": Case(FedET(steps=3))}
KEPT = {"FedET": Kept("FedET", models=("global", "server"), options={"steps": 1}, public=True)}


class Large(Toy):
    """The first layer of ``Toy`` below more of them."""

    def make(self, hidden, dropout):
        return nn.Sequential(
            nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, 16), nn.Tanh(), nn.Linear(16, CLASSES)
        )


def models(optimizer="sgd", lr=0.3, **options):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        found = {"small": Toy(optimizer, lr=lr), "deep": Deep(optimizer, lr=lr), "large": Large(optimizer, lr=lr)}
    return ClientModels(found, server="large", **options)


def teach(stack, lam):
    """Sample by sample: pseudo-label and diverse logits."""
    labels, diverse = [], []
    for n in range(stack.shape[1]):
        variances = [z[n].var(correction=0) for z in stack]
        a = [v / sum(variances) for v in variances]
        z = sum(w * own[n] for w, own in zip(a, stack, strict=True))
        y = int(z.argmax())
        apart = [(w, own[n]) for w, own in zip(a, stack, strict=True) if int(own[n].argmax()) != y]
        labels.append(y)
        diverse.append(sum(w * own for w, own in apart) / sum(w for w, _ in apart) if apart else None)

    def loss(logits):
        total = F.cross_entropy(logits, torch.tensor(labels))
        for n, z in enumerate(diverse):
            if z is not None:
                total = total + lam / len(labels) * (z.softmax(0) * (z.log_softmax(0) - logits[n].log_softmax(0))).sum()
        return total

    return loss


def by_hand(module, data, visits, steps, lr, lam, transfer=()):
    """Full-batch SGD at clients, Adam at the server with all public samples in every step."""
    kinds = {client: ["small", "deep"][int(client) % 2] for client in data.tensors}
    means = {name: copy.deepcopy(module.model(name)) for name in ("small", "deep")}
    large, x = copy.deepcopy(module.model("large")), data.public_dataloader().dataset.tensors[0]
    for clients in visits:
        came = []
        for client in clients:
            model, (own_x, own_y) = copy.deepcopy(means[kinds[client]]), data.tensors[client]["train"]
            for _ in range(2):
                grads = torch.autograd.grad(F.cross_entropy(model(own_x), own_y), list(model.parameters()))
                with torch.no_grad():
                    for p, g in zip(model.parameters(), grads, strict=True):
                        p -= model.lr * g
            came.append((client, model))
        for name, mean in means.items():
            mine = [(len(data.tensors[c]["train"][0]), m) for c, m in came if kinds[c] == name]
            if mine:
                total = sum(n for n, _ in mine)
                state = {k: sum(n * module_state(m)[k] for n, m in mine) / total for k in module_state(mean)}
                mean.load_state_dict(state)
        with torch.no_grad():
            loss = teach(torch.stack([m(x) for _, m in came]), lam)
        adam = torch.optim.Adam(large.parameters(), lr)
        for _ in range(steps):
            adam.zero_grad()
            loss(large(x)).backward()
            adam.step()
        for mean in means.values():
            mean.load_state_dict(
                {k: module_state(large)[k] if k in transfer else v for k, v in module_state(mean).items()}
            )
    return {name: module_state(model) for name, model in means.items()} | {"global": module_state(large)}


@pytest.mark.parametrize(
    ("options", "transfer"),
    [({}, ()), ({"diversity": 1.0, "transfer": "net.0"}, ("net.0.weight", "net.0.bias"))],
    ids=["paper", "transfer"],
)
def test_three_rounds_of_three_architectures_are_what_the_formulas_say(options, transfer):
    module, data = models(), public_data()
    callback = FedET(steps=4, lr=0.01, batch_size=64, **options)
    trainer, spy = spied(module, data, [callback], max_rounds=3, local_epochs=2, participation=2)
    visits = [list(spy.of_round(number)) for number in range(3)]
    assert len({tuple(clients) for clients in visits}) > 1
    wanted = by_hand(module, data, visits, 4, 0.01, options.get("diversity", 0.05), transfer)
    assert set(trainer.server.models) == set(wanted)
    for name, state in wanted.items():
        close(trainer.server.models[name], state, atol=1e-5)
    same(own_models(trainer)["1"], trainer.server.models["deep"])
    assert trainer.server.costs.bytes_up == sum(u.num_bytes for u in spy.updates) and not any(
        u.extras for u in spy.updates
    )


def test_weights_sum_to_one_and_equal_variances_give_the_plain_mean():
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(3, 7, 4, generator=draw)
    torch.testing.assert_close(confidence(z).sum(0), torch.ones(7))
    one = torch.randn(7, 4, generator=draw)
    alike = torch.stack([one, one.roll(1, 1), one.roll(2, 1)])
    torch.testing.assert_close(confidence(alike), torch.full((3, 7), 1 / 3))
    assert torch.equal(lessons(alike)[:, 0].long(), alike.double().mean(0).argmax(1))
    torch.testing.assert_close(confidence(torch.ones(3, 2, 4)), torch.full((3, 2), 1 / 3))


def test_where_all_agree_there_is_no_diversity_term():
    z = torch.tensor([[[3.0, 0.0, 1.0]], [[9.0, 1.0, 0.0]]])
    assert not lessons(z)[:, 1:].any()
    module, data = models(), public_data((24,))
    runs = [
        federate(module, data, [FedET(steps=3, diversity=d)], max_rounds=2).server.models["global"] for d in (0.0, 5.0)
    ]
    same(*runs)  # one teacher


def test_without_steps_it_is_fedavg():
    module, data = NormNet("momentum", dropout=0.3), public_data(batch_size=8)
    plain = federate(module, data, [FedAvg()], max_rounds=2)
    ours = federate(module, data, [FedET(steps=0)], max_rounds=2)
    same(ours.server.model, plain.server.model)
    same(ours.server.models["server"], module_state(module))


def test_stage_g_scores_the_large_model_and_l1_the_small_ones(tmp_path):
    trainer = federate(
        models(), public_data(), [FedET(steps=5), LocalCheckpoint()], tmp_path, max_rounds=2, evaluation=1
    )
    assert type(trainer.module()) is Large and type(trainer.module("0")) is Toy
    data, large = public_data(), trainer.server.module_with(trainer.server.model)
    for row in trainer.recorder.rows:
        if (row.stage, row.round, row.metric, row.split, row.data) == ("G", 2, "val_loss", "val", "local"):
            x, y = data.tensors[row.client]["val"]
            with torch.no_grad():
                assert row.value == pytest.approx(float(F.cross_entropy(large.eval()(x), y)), abs=1e-5)
    assert {row.client for row in trainer.recorder.rows if row.stage == "G"} >= set("012")
    assert (trainer.recorder.run.path / "checkpoints/global.ckpt").exists()


def start():
    return (
        models("momentum"),
        public_data((24, 40, 16, 20)),
        [FedET(steps=3, batch_size=6, public_samples=15), FedProx(mu=0.1)],
    )


def test_two_architectures_resume_bit_for_bit(tmp_path):
    whole = federate(*start(), max_rounds=3, participation=2)
    half = federate(*start(), tmp_path / "h", max_rounds=2, participation=2)
    again = resumed(half, *start(), 3, participation=2)
    assert set(again.server.models) == set(whole.server.models)
    for key, state in whole.server.models.items():
        same(again.server.models[key], state)


@pytest.mark.slow
def test_worker_processes_change_nothing():
    runs = [federate(*start(), max_rounds=2, **e).server.models for e in ({}, {"engine": Processes(2)})]
    for key, state in runs[0].items():
        same(runs[1][key], state)


def test_a_server_optimizer_moves_the_means():
    module, data = models(), public_data()
    runs = [
        federate(module, data, [FedET(steps=2), *more], max_rounds=2).server for more in ((), (FedAdam(server_lr=0.1),))
    ]
    assert differs(runs[0].models["deep"], runs[1].models["deep"])


def test_frozen_entries_of_the_large_model_stay():
    module = models()
    module.model("large").net[0].requires_grad_(False)
    trainer = federate(module, public_data(), [FedET(steps=2)], max_rounds=1)
    assert torch.equal(trainer.server.model["net.0.weight"], module.model("large").net[0].weight)
    assert differs(trainer.server.model, module_state(module.model("large")))


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ValueError, match="FedET trains on public data, but the data module has none"):
        federate(Toy(), toy_data(), [FedET()])
    with pytest.raises(ValueError, match=r"'net.2.weight' is \(16, 8\) in the server's model and missing in 'small'"):
        federate(models(), public_data(), [FedET(transfer=["net.0", "net.2"])])
    with pytest.raises(ValueError, match=r"FedET .*FedPer"):
        federate(Toy(), public_data(), [FedET(), FedPer(personal="net.3")])
    with pytest.raises(ValueError, match=r"FedET has a large model of its own.*, and GlobalCheckpoint selects"):
        federate(Toy(), public_data(), [FedET(), GlobalCheckpoint()], tmp_path, max_rounds=1)
    with pytest.raises(ValueError, match=r"FedET .*float_buffers='local'"):
        federate(Toy(), public_data(), [FedET()], float_buffers="local")
    for name, value in {"steps": -1, "diversity": -1, "batch_size": 0, "lr": 0, "public_samples": -1}.items():
        with pytest.raises(ValueError, match=f"FedET got {name}="):
            FedET(**{name: value})
