"""FedGKT: algorithms-2, entry 2.14."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedlightning
from fedlightning.callbacks import FedAdam, FedGKT, FedPer, FedProx, GlobalCheckpoint, Local, LocalCheckpoint
from fedlightning.callbacks.fedgkt import make_head
from fedlightning.options import Processes
from fedlightning.tensors import module_state
from tests.callbacks.public import Deep, own_models, resumed, two_models
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import CLASSES, FEATURES, NormNet, Toy, close, differs, federate, make_trainer, same, spied, toy_data

CASES = {
    "FedGKT": Case(
        FedGKT(server_hidden=[5], server_epochs=1, server_batch_size=8, head="head"),
        neutral=FedGKT(alpha=0.0, deploy="edge", server_hidden=[5], head="head"),
    ),
    "FedGKT edge": Case(FedGKT(server_hidden=[], max_age=1, deploy="edge", head="head"), skip=NO_PLAIN_FORM),
}
KEPT = {"FedGKT": Kept("FedGKT", server=("head", "logits", "rounds"), options={"server_hidden": [4], "head": "net.3"})}


def kd(teacher, student, t):
    q, p = (teacher / t).softmax(1), (student / t).softmax(1)
    return t * t * (q * (q.log() - p.log())).sum(1).mean()


def by_hand(modules, head, data, visits, alpha, beta, t, epochs, lr, max_age=None):
    """Full batches everywhere: two epochs at clients, ``epochs`` at the server."""
    own, logits, last = {c: copy.deepcopy(m) for c, m in modules.items()}, {}, {}
    for number, clients in enumerate(visits):
        came = {}
        for client in clients:
            model, (x, y) = own[client], data.tensors[client]["train"]
            fresh = client in logits and (max_age is None or number - last[client] <= max_age)
            for _ in range(2):
                z = model(x)
                loss = F.cross_entropy(z, y) + (alpha * kd(logits[client], z, t) if fresh else 0)
                grads = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for p, g in zip(model.parameters(), grads, strict=True):
                        p -= model.lr * g
            with torch.no_grad():
                came[client] = (model.net[:-1](x), model(x), y)
        h, z, y = (torch.cat([part[k] for part in came.values()]) for k in range(3))
        adam = torch.optim.Adam(head.parameters(), lr)
        for _ in range(epochs):
            adam.zero_grad()
            (F.cross_entropy(head(h), y) + beta * kd(z, head(h), t)).backward()
            adam.step()
        with torch.no_grad():
            logits |= {client: head(features) for client, (features, _, _) in came.items()}
        last |= dict.fromkeys(came, number)
    return {client: module_state(model) for client, model in own.items()}, logits


@pytest.mark.parametrize(
    "options", [{}, {"alpha": 0.5, "server_alpha": 2.0, "temperature": 1.5, "max_age": 1, "server_hidden": []}], ids=str
)
def test_three_rounds_of_two_architectures_are_what_the_formulas_say(options):
    module, data = two_models(lr=0.1), toy_data((24, 40, 16), batch_size=64)
    callback = FedGKT(**{"server_hidden": [6], **options}, server_epochs=3, server_batch_size=128, server_lr=0.01)
    trainer, spy = spied(module, data, [callback], max_rounds=4, local_epochs=2, participation=2)
    visits = [list(spy.of_round(number)) for number in range(4)]
    assert len({tuple(clients) for clients in visits}) > 1
    start = {client: module.model(["small", "deep"][int(client) % 2]) for client in "012"}
    head = make_head(8, callback.server_hidden, CLASSES, trainer.server.seed, "FedGKT")
    wanted, logits = by_hand(
        start,
        head,
        data,
        visits,
        callback.alpha,
        callback.server_alpha,
        callback.temperature,
        3,
        0.01,
        callback.max_age,
    )
    own = trainer.server.state["FedGKT"]
    close(own["head"], head.state_dict(), atol=1e-5)
    for client, state in wanted.items():
        kept = trainer.store.get(client).personal or module_state(start[client])
        close(kept, state, atol=1e-5)
    for client, rows in logits.items():
        torch.testing.assert_close(own["logits"][client], rows, atol=1e-5, rtol=1e-5)


def test_logits_belong_to_the_samples_they_were_found_for():
    """With shuffled small batches: the logits that come back are those of the features in the order of the dataset."""
    data = toy_data((24, 40), batch_size=5)
    trainer, spy = spied(Toy(lr=0.0), data, [FedGKT(server_hidden=[4])], max_rounds=2)
    for update in spy.updates:
        x, y = data.tensors[update.client]["train"]
        sent = update.extras["FedGKT"]
        assert torch.equal(sent["labels"], y)
        begun = trainer.server.module  # which a learning rate of 0 leaves
        with torch.no_grad():
            torch.testing.assert_close(sent["logits"], begun.net(x))
            torch.testing.assert_close(sent["features"], begun.net[:3](x))
    sent = [m.extras["FedGKT"]["logits"] for m in spy.messages if m.round == 1 and m.tag == "train" and m.client == "0"]
    assert sent[0].shape == (24, CLASSES)


def test_paired_batches_are_those_of_training_with_their_own_rows():
    """``client.samples``: rows follow their samples through the shuffled order, in every epoch."""
    seen = []

    class Look(FedGKT):
        def _loss(self, client, module, paired, batch_idx):
            seen.append((client.id, paired.batch[0].detach().cpu(), paired.targets.detach().cpu()))
            return super()._loss(client, module, paired, batch_idx)

    data = toy_data((24, 17), batch_size=5)
    _, spy = spied(Toy(), data, [Look(server_hidden=[4])], max_rounds=2, local_epochs=2)
    sent = {m.client: m.extras["Look"]["logits"] for m in spy.messages if m.round == 1 and m.tag == "train"}
    for client, x, targets in seen:
        numbers = [(data.tensors[client]["train"][0] == row).all(1).nonzero()[0, 0] for row in x]
        assert torch.equal(targets, sent[client][torch.stack(numbers)])
    mine = [x for client, x, _ in seen if client == "0"]
    assert [len(x) for x in mine] == [5, 5, 5, 5, 4] * 2 and not torch.equal(mine[0], mine[5])


def test_without_alpha_clients_train_alone():
    module, data = NormNet("momentum", dropout=0.3), toy_data()
    alone = own_models(federate(module, data, [Local()], max_rounds=2, optimizer_state="reset"))
    trainer = federate(module, data, [FedGKT(alpha=0.0, server_hidden=[4], deploy="edge")], max_rounds=2)
    for client, state in own_models(trainer).items():
        same(state, alone[client])
    assert trainer.server.state["FedGKT"]["logits"] == {}
    runs = [
        federate(module, data, [FedGKT(alpha=0.0, server_alpha=a, server_hidden=[4])], max_rounds=1).server.state[
            "FedGKT"
        ]
        for a in (0.0, 1.0)
    ]
    assert differs(runs[0]["head"], runs[1]["head"])


def test_the_server_gets_features_logits_and_labels_and_no_input_and_all_is_counted():
    data = toy_data((24, 40))
    trainer, spy = spied(NormNet(), data, [FedGKT(server_hidden=[4])], max_rounds=2)
    for update in spy.updates:
        n = len(data.tensors[update.client]["train"][0])
        assert not update.state and update.num_bytes == n * (4 * 8 + 4 * CLASSES + 8)
        assert FEATURES not in {tensor.shape[-1] for tensor in update.extras["FedGKT"].values() if tensor.ndim > 1}
    sizes = [m.num_bytes for m in spy.messages if m.tag == "train"]
    assert sizes == [0, 0, 24 * 4 * CLASSES, 40 * 4 * CLASSES]
    assert trainer.server.costs.bytes_down == sum(sizes)


def test_the_deployed_model_is_the_extractor_below_the_servers_head(tmp_path):
    data = toy_data((24, 40))
    callbacks = [FedGKT(server_hidden=[5, 4]), LocalCheckpoint()]
    trainer = federate(two_models(), data, callbacks, tmp_path, max_rounds=2, evaluation=1)
    head = trainer.server.state["FedGKT"]["head"]
    for client, kind in (("0", Toy), ("1", Deep)):
        deployed, x = trainer.module(client).eval(), data.tensors[client]["val"][0]
        own = trainer.store.get(client).personal
        with torch.no_grad():
            plain = kind()
            plain.load_state_dict(own)
            h = plain.net[:-1](x)
            for number, place in enumerate((1, 3, 5)):
                h = h @ head[f"{place}.weight"].T + head[f"{place}.bias"]
                h = h.relu() if number < 2 else h
            torch.testing.assert_close(deployed(x), h, atol=1e-5, rtol=1e-5)
    again = fedlightning.load(
        next((trainer.recorder.run.path / "checkpoints/clients").glob("1.ckpt")), trust=["tests"]
    ).eval()
    best = trainer.module("1", "best_local").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(x), best(x))


def start():
    callback = FedGKT(server_hidden=[4], server_batch_size=10, server_epochs=2)
    return two_models("momentum", lr=0.1), toy_data((24, 40, 16)), [callback]


@pytest.mark.slow
def test_two_architectures_resume_bit_for_bit(tmp_path):
    whole = federate(*start(), max_rounds=3, participation=2)
    half = federate(*start(), tmp_path / "h", max_rounds=2, participation=2)
    again = resumed(half, *start(), 3, participation=2)
    same(again.server.state["FedGKT"]["head"], whole.server.state["FedGKT"]["head"])
    for client, state in own_models(whole).items():
        same(own_models(again)[client], state)


@pytest.mark.slow
def test_worker_processes_change_nothing():
    runs = [own_models(federate(*start(), max_rounds=2, **e)) for e in ({}, {"engine": Processes(2)})]
    for client, state in runs[0].items():
        same(runs[1][client], state)


def test_what_cannot_work_is_refused(tmp_path):
    class Squared(Toy):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 2

    with pytest.raises(ValueError, match=r"training_step of Squared has another loss"):
        federate(Squared(), toy_data(), [FedGKT()])
    federate(Squared(), toy_data(), [FedGKT(alpha=0.0, server_hidden=[])], max_rounds=1)

    class Noisy(type(toy_data())):
        def client_dataloader(self, client, split):
            loader = super().client_dataloader(client, split)
            if loader is not None:
                plain = loader.collate_fn
                loader.collate_fn = lambda samples: [plain(samples)[0] + torch.rand(1), plain(samples)[1]]
            return loader

    with pytest.raises(ValueError, match=r"another sample every time .* Remove random augmentation"):
        federate(Toy(), Noisy(toy_data().tensors), [FedGKT()])
    wide = two_models()
    wide.models["deep"] = Toy(hidden=5)
    with pytest.raises(ValueError, match=r"those of 'small' have 8 numbers, those of 'deep' 5"):
        federate(wide, toy_data(), [FedGKT()])
    for other in (FedAdam(), FedProx(mu=0.1), FedPer(personal="net.3")):
        with pytest.raises(ValueError, match=rf"FedGKT lets no model travel, .*and {other.key} "):
            federate(Toy(), toy_data(), [FedGKT(), other])
    with pytest.raises(ValueError, match=r"GlobalCheckpoint"):
        federate(Toy(), toy_data(), [FedGKT(), GlobalCheckpoint()], tmp_path, max_rounds=1)
    for name, value in {"alpha": -1, "server_alpha": -1, "temperature": 0, "server_lr": 0, "server_epochs": 0,
                        "server_batch_size": 0, "max_age": 0, "deploy": "x"}.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"FedGKT got {name}="):
            FedGKT(**{name: value})
    with pytest.raises(
        ValueError, match=r"FedGKT got server_hidden=\[0\]. Use a list, each a whole number in \[1, inf\)"
    ):
        FedGKT(server_hidden=[0])


def test_a_head_of_several_layers():
    class Pieces(Toy):
        def make(self, hidden, dropout):
            return nn.ModuleDict(
                {"body": nn.Linear(FEATURES, 7), "head": nn.Sequential(nn.ReLU(), nn.Linear(7, CLASSES))}
            )

        def forward(self, x):
            return self.net["head"](self.net["body"](x))

    trainer = make_trainer(None, [FedGKT(head="net.head", server_hidden=[4])], max_rounds=2)
    trainer.fit(Pieces(), datamodule=toy_data())
    assert trainer.server.state["FedGKT"]["head"]["1.weight"].shape == (4, 7)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_other_precisions_are_the_same_task(precision):
    """The check before round 1 compares two losses: both are in the run's precision."""
    trainer = federate(Toy(), toy_data(), [FedGKT(server_hidden=[4], head="net.3")], max_rounds=1, precision=precision)
    assert trainer.rounds_done == 1 and not trainer.server.failures
