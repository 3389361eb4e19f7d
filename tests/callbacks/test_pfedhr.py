"""pFedHR: algorithms-2, entry 2.17."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks import SCAFFOLD, FedAdam, FedPer, FedProx, GlobalCheckpoint, Local, LocalCheckpoint, pFedHR
from fedlightning.callbacks.pfedhr import Reassembly
from fedlightning.models import ClientModels
from fedlightning.options import Processes
from fedlightning.tensors import clone, module_state
from tests.callbacks.public import PublicToyData, own_models, public_data, public_x, resumed, two_models
from tests.callbacks.test_blocks import Residual
from tests.conformance.case import Case, Kept
from tests.helpers import CLASSES, FEATURES, NormNet, Toy, close, differs, federate, same, spied, toy_data

FULL = "the full toy module is not a chain of layers"
CASES = {
    "pFedHR": Case(
        pFedHR(lam=1.0, depths=(2, 3), fine_tune_epochs=1, num_candidates=2),
        neutral=pFedHR(lam=0.0),
        skip={"wire": f"clients' own models travel, by definition; {FULL}", "every_kind_of_entry": FULL},
    ),
}
KEPT = {"pFedHR": Kept("pFedHR", server=("candidates", "given"), options={"fine_tune_epochs": 0}, public=True)}


class Conv(Toy):
    """A convolution before two layers."""

    def make(self, hidden, dropout):
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 5), nn.Tanh(),
            nn.Linear(5, CLASSES),
        )  # fmt: skip


KINDS = ["small", "conv"]
SHAPES = {"small": [(FEATURES,), (8,)], "conv": [(1, 2, 3), (6,), (5,)]}
"""By architecture, the shape in which each layer takes a sample, after what stands before it."""


def models(optimizer="sgd", lr=0.3, **options):
    """Clients in turn have a ``Toy`` and a ``Conv``."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return ClientModels({"small": Toy(optimizer, lr=lr), "conv": Conv(optimizer, lr=lr)}, **options)


def layers(entries):
    """The layers of a network's state, in order: pairs of weight and bias."""
    names = [name.removesuffix(".weight") for name in entries if name.endswith(".weight")]
    return [(entries[f"{name}.weight"], entries[f"{name}.bias"]) for name in names]


def block_by_hand(kind, depth, weight, bias, x):
    """A block of ``Toy`` or ``Conv`` in plain torch. The first one takes samples as they are."""
    if kind == "conv" and depth == 0:
        return F.conv2d(x.reshape(-1, 1, 2, 3), weight, bias).clamp(min=0).reshape(len(x), 6)
    x = x @ weight.T + bias
    return x.clamp(min=0) if (kind, depth) == ("small", 0) else x.tanh() if (kind, depth) == ("conv", 1) else x


def own_by_hand(kind, state, x):
    for depth, (weight, bias) in enumerate(layers(state)):
        x = block_by_hand(kind, depth, weight, bias, x)
    return x


INTO = {"small": [FEATURES, 8], "conv": [FEATURES, 6, 5]}
OUT = {"small": [8, CLASSES], "conv": [6, 5, CLASSES]}


def candidate_by_hand(described, x):
    """What a description says, in plain torch."""
    width = FEATURES
    for place, (index, depth) in enumerate(described["blocks"].tolist()):
        kind = KINDS[index]
        if width != INTO[kind][depth]:
            name = f"net.stitches.{place}"
            x = (x @ described[f"{name}.weight"].T + described[f"{name}.bias"]).clamp(min=0)
        own = {name: value for name, value in described.items() if name.startswith(f"net.blocks.{place}.")}
        ((weight, bias),) = layers(own)
        x = block_by_hand(kind, depth, weight, bias, x)
        width = OUT[kind][depth]
    if "net.head.weight" in described:
        x = x @ described["net.head.weight"].T + described["net.head.bias"]
    return x


def train_by_hand(kind, state, x, y, teacher, lam, lr, steps):
    """Full-batch SGD on CE + lam KL."""
    state = {name: value.clone().requires_grad_() for name, value in state.items()}
    for _ in range(steps):
        z = own_by_hand(kind, state, x)
        loss = F.cross_entropy(z, y)
        if teacher is not None:
            t = candidate_by_hand(teacher, x).softmax(1)
            loss = loss + lam * (t * (t.log() - z.log_softmax(1))).sum(1).mean()
        gradients = torch.autograd.grad(loss, list(state.values()))
        state = {
            name: (value - lr * gradient).detach().requires_grad_()
            for (name, value), gradient in zip(state.items(), gradients, strict=True)
        }
    return {name: value.detach() for name, value in state.items()}


@pytest.fixture
def rounds(monkeypatch):
    """What the server makes in each round: the models that came, the candidates, who gets which."""
    made, before = [], Reassembly.__init__

    def noted(self, algorithm, server, models):
        before(self, algorithm, server, models)
        made.append(
            ({client: clone(state) for client, state in models.items()}, self.candidates, self.choice_by_client)
        )

    monkeypatch.setattr(Reassembly, "__init__", noted)
    return made


@pytest.mark.parametrize("options", [{}, {"grouping": "means", "num_candidates": 6}], ids=["medoids", "means"])
def test_four_rounds_are_what_the_formulas_say(rounds, options):
    """Local steps, similarity and assignment; two of four clients take part, of two architectures."""
    module, data = models(), public_data((24, 40, 16, 20))
    method = pFedHR(lam=2.0, fine_tune_epochs=1, depths=(2, 4), **options)
    trainer, spy = spied(module, data, [method], max_rounds=4, participation=2, local_epochs=2)
    own = {str(i): module_state(module.model(KINDS[i % 2])) for i in range(4)}
    given, x = {}, public_x(data)
    for sent, made, now in rounds:
        for client, state in sent.items():
            kind = KINDS[int(client) % 2]
            own[client] = train_by_hand(
                kind, own[client], *data.tensors[client]["train"], given.get(client), lam=2.0, lr=0.3, steps=2
            )
            close(state, own[client], atol=1e-5)
            outputs = {key: candidate_by_hand(described, x) for key, described in made.items()}
            z = own_by_hand(kind, own[client], x)
            alike = {key: float(F.cosine_similarity(z, other).mean()) for key, other in outputs.items()}
            assert alike[now[client]] == pytest.approx(max(alike.values()), abs=1e-6)
            given[client] = made[now[client]]
    assert len({tuple(sent) for sent, _, _ in rounds}) > 1 and {len(sent) for sent, _, _ in rounds} == {2}
    assert sum(m.extras != {} for m in spy.messages) >= 2  # somebody came back
    for client, state in own_models(trainer).items():
        close(state, own[client], atol=1e-5)


def test_candidates_are_made_of_what_came_and_keep_the_rules(rounds):
    module, data = models(), public_data((24, 40, 16, 20))
    federate(module, data, [pFedHR(fine_tune_epochs=0, num_candidates=5)], max_rounds=2)
    for sent, made, given in rounds:
        assert set(given) == set(sent) == set("0123") and set(given.values()) <= set(made) and len(made) == 5
        came = {KINDS[i]: [layers(sent[str(c)]) for c in (i, i + 2)] for i in range(2)}
        for described in made.values():
            table = described["blocks"].tolist()
            assert 4 <= len(table) <= 6
            kinds = [KINDS[index] for index, _ in table]
            first_fc = next(p for p, (i, d) in enumerate(table) if (KINDS[i], d) != ("conv", 0))
            assert first_fc > 0 and not any((KINDS[i], d) == ("conv", 0) for i, d in table[first_fc:])
            for place, (kind, (_, depth)) in enumerate(zip(kinds, table, strict=True)):
                own = {name: value for name, value in described.items() if name.startswith(f"net.blocks.{place}.")}
                ((weight, bias),) = layers(own)
                assert any(
                    torch.equal(net[depth][0], weight) and torch.equal(net[depth][1], bias) for net in came[kind]
                )


@pytest.mark.slow
def test_fine_tuning_lowers_the_loss_on_public_data(rounds):
    module, data = models(), public_data()
    x, y = data.public_dataloader().dataset.tensors
    losses = []
    for epochs in (0, 30):
        federate(module, data, [pFedHR(fine_tune_epochs=epochs, fine_tune_lr=0.01)], max_rounds=1)
        losses.append([float(F.cross_entropy(candidate_by_hand(d, x), y)) for d in rounds[-1][1].values()])
    assert all(after < before for before, after in zip(*losses, strict=True))


@pytest.mark.slow
def test_without_labels_views_are_compared_and_the_classifier_is_somebodys(rounds):
    module, data = models(), public_data()
    bare = PublicToyData(data.tensors, batch_size=64)
    bare.public_dataloader = lambda: DataLoader(TensorDataset(public_x(data)), batch_size=64)
    federate(module, bare, [pFedHR()], max_rounds=1)
    federate(module, data, [pFedHR(labels=False)], max_rounds=1)
    federate(module, data, [pFedHR()], max_rounds=1)
    (_, one, _), (_, other, _), (_, labelled, _) = rounds
    for key, described in one.items():
        same(described, other[key])
        assert "net.head.weight" not in described
        assert described["blocks"].tolist()[-1] in ([0, 1], [1, 2])
    assert any(key not in one or differs(described, one[key]) for key, described in labelled.items())
    with pytest.raises(ValueError, match=r"pFedHR.* needs one class label a sample"):
        federate(module, bare, [pFedHR(labels=True)])


@pytest.mark.slow
def test_a_client_alone_is_its_own_candidate(rounds):
    """Its teacher is the network it has sent: the first step of a visit has no pull, and later ones pull back."""
    module, data = Toy(lr=0.3), public_data((24,))
    method = pFedHR(lam=3.0, depths=(2, 2), fine_tune_epochs=0)
    runs = {
        (lam, steps): own_models(
            federate(
                module, data, [pFedHR(lam=lam, depths=(2, 2), fine_tune_epochs=0)], max_rounds=2, local_steps=steps
            )
        )["0"]
        for lam in (0.0, 3.0)
        for steps in (1, 3)
    }
    close(runs[0.0, 1], runs[3.0, 1])
    assert differs(runs[0.0, 3], runs[3.0, 3])
    rounds.clear()
    federate(module, data, [method], max_rounds=1)
    ((sent, made, given),) = rounds
    assert list(made) == ["0.0"] and given == {"0": "0.0"}
    x = public_x(data)
    torch.testing.assert_close(candidate_by_hand(made["0.0"], x), own_by_hand("small", sent["0"], x))


def test_without_strength_it_is_local_training_and_nothing_travels():
    module, data = NormNet("momentum", dropout=0.3), public_data(batch_size=8)
    alone = own_models(federate(module, data, [Local()], max_rounds=2, optimizer_state="reset"))
    trainer, spy = spied(module, data, [pFedHR(lam=0.0)], max_rounds=2)
    for client, state in own_models(trainer).items():
        same(state, alone[client])
    assert not any(item.num_bytes for item in (*spy.messages, *spy.updates)) and not trainer.server.state


@pytest.mark.slow
def test_the_first_round_has_no_term_and_later_ones_have():
    module, data = models("adam", lr=0.01), public_data(batch_size=8)
    for count in (1, 2):
        runs = [own_models(federate(module, data, [pFedHR(lam=lam)], max_rounds=count)) for lam in (0.0, 1.0)]
        assert all(differs(runs[0][client], runs[1][client]) == (count == 2) for client in runs[0])


@pytest.mark.slow
def test_an_absent_client_keeps_the_candidate_it_was_given():
    module, data = models(), public_data((24, 40, 16, 20))
    _, spy = spied(module, data, [pFedHR(fine_tune_epochs=0)], max_rounds=6, participation=2, local_epochs=1)
    gaps, last = 0, {}
    for number, state in enumerate(spy.states):
        for message in (m for m in spy.messages if m.round == number and m.work != 0):
            if message.client in last:
                when, candidate = last[message.client]
                gaps += when < number - 1
                same(message.extras["pFedHR"]["candidate"], candidate)
            else:
                assert "pFedHR" not in message.extras
        own = state["pFedHR"]
        assert set(own["candidates"]) == set(own["given"].values())  # what nobody has is dropped
        for client, key in own["given"].items():
            if client in spy.of_round(number):
                assert key.startswith(f"{number}.")
                last[client] = number, own["candidates"][key]
    assert gaps > 0


@pytest.mark.slow
def test_the_wire_carries_named_tensors_that_are_counted():
    module, data = models(), public_data((24, 40, 16, 20))
    trainer, spy = spied(module, data, [pFedHR()], max_rounds=2)
    assert not any(item.state for item in (*spy.messages, *spy.updates))
    for update in spy.updates:
        sent = update.extras["pFedHR"]["model"]
        assert sent.keys() == module_state(module.model(KINDS[int(update.client) % 2])).keys()
        assert update.num_bytes == sum(4 * value.numel() for value in sent.values())
    trained = [message for message in spy.messages if message.work != 0]
    assert [message.num_bytes > 0 for message in trained] == [False] * 4 + [True] * 4
    for message in trained[4:]:
        described = message.extras["pFedHR"]["candidate"]
        assert all(isinstance(value, torch.Tensor) for value in described.values())
        numbers = sum(value.numel() for value in described.values())
        assert message.num_bytes == 4 * numbers + 4 * described["blocks"].numel()  # the table is of int64
    assert trainer.server.costs.bytes_up == sum(update.num_bytes for update in spy.updates)
    assert trainer.server.costs.bytes_down == sum(message.num_bytes for message in trained)


RESUMED = pFedHR(lam=1.0, fine_tune_epochs=1, num_candidates=2)


def same_runs(one, other):
    for client, state in own_models(one).items():
        same(own_models(other)[client], state)
    mine, theirs = (it.server.state["pFedHR"] for it in (one, other))
    assert mine["given"] == theirs["given"] and mine["candidates"].keys() == theirs["candidates"].keys()
    for key, described in mine["candidates"].items():
        same(described, theirs["candidates"][key])


@pytest.mark.slow
def test_resume_in_the_middle_changes_nothing(tmp_path):
    data = public_data((24, 40, 16, 20), batch_size=8)
    whole = federate(models("momentum", 0.1), data, [RESUMED], max_rounds=3, participation=3)
    half = federate(models("momentum", 0.1), data, [RESUMED], tmp_path, max_rounds=2, save_state=1, participation=3)
    same_runs(whole, resumed(half, models("momentum", 0.1), data, [RESUMED], 3, participation=3))


@pytest.mark.slow
def test_worker_processes_change_nothing():
    data = public_data((24, 40), batch_size=8)
    run = [
        federate(models("momentum", 0.1), data, [RESUMED], max_rounds=2, **given)
        for given in ({}, {"engine": Processes(2)})
    ]
    same_runs(*run)


def test_batch_norm_and_a_last_batch_of_one_sample(rounds):
    """21 public samples in batches of 4 leave one, on which batch normalisation cannot train; copies are tuned too."""
    data = public_data((24, 40), public=21)
    module = NormNet(dropout=0.2)
    for tune in (False, True):
        federate(module, data, [pFedHR(batch_size=4, tune_models=tune)], max_rounds=1)
    (sent, made, _), (again, others, _) = rounds
    for client, state in sent.items():
        same(state, again[client])
    for key, described in made.items():
        same(described, others[key])
        assert any(name.endswith("running_var") for name in described)


class Reshaped(Toy):
    """Its network takes what its transfer hook makes of the loader's flat samples."""

    def make(self, hidden, dropout):
        return nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, CLASSES))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [10 * batch[0].reshape(-1, 1, 2, 3), *batch[1:]]


def test_networks_see_public_data_as_their_own_batches(rounds):
    data = public_data((24, 40))
    federate(Reshaped(), data, [pFedHR(depths=(2, 2), fine_tune_epochs=0)], max_rounds=2)
    x = 10 * public_x(data).reshape(-1, 1, 2, 3)
    for sent, made, given in rounds:
        for client, state in sent.items():
            z = reshaped_by_hand(layers(state), x)
            alike = {}
            for key, described in made.items():
                if described["blocks"].tolist() == [[0, 0], [0, 1]]:
                    own = {name: described[name] for name in described if ".blocks." in name}
                    alike[key] = float(F.cosine_similarity(z, reshaped_by_hand(layers(own), x)).mean())
            assert len(alike) > 1 and alike[given[client]] == pytest.approx(max(alike.values()), abs=1e-6)


def reshaped_by_hand(own, x):
    (kernel, shift), (weight, bias) = own
    return F.conv2d(x, kernel, shift).clamp(min=0).flatten(1) @ weight.T + bias


def test_where_no_candidate_fits_clients_keep_what_they_have():
    with pytest.warns(UserWarning, match=r"found no candidate that keeps the rules.*max_stitch=1; clients keep"):
        trainer = federate(models(), public_data((24, 40)), [pFedHR(depths=(4, 5), max_stitch=1)], max_rounds=2)
    assert not trainer.server.state.get("pFedHR")


SHARED = models()


@pytest.mark.slow
def test_teachers_of_the_same_round_do_not_depend_on_the_global_generators():
    data = public_data(batch_size=8)
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        runs.append(own_models(federate(copy.deepcopy(SHARED), data, [pFedHR(lam=1.0)], max_rounds=2)))
    for client in runs[0]:
        same(runs[0][client], runs[1][client])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lam": -1.0}, r"lam=-1.0. Use a number in \[0, inf\)"),
        ({"num_groups": 0}, r"num_groups=0. Use a whole number in \[1, inf\)"),
        ({"batch_size": 1}, r"batch_size=1. Use a whole number in \[2, inf\), or None"),
        ({"temperature": 0.0}, r"temperature=0.0. Use a number in \(0, inf\)"),
        ({"depths": (5, 4)}, r"depths=\(5, 4\)"),
        ({"depths": (1, 2), "num_groups": 3}, "has one of every group at least"),
        ({"grouping": "soft"}, "Use 'medoids' or 'means'"),
    ],
)
def test_arguments_are_refused(options, says):
    with pytest.raises(ValueError, match=rf"pFedHR got .*{says}"):
        pFedHR(**options)


@pytest.mark.parametrize("other", [FedAdam(), SCAFFOLD(), FedPer(personal="net.3"), FedProx(), GlobalCheckpoint()])
def test_callbacks_on_a_model_that_travels_are_refused(other):
    with pytest.raises(ValueError, match=r"pFedHR|GlobalCheckpoint needs a global model"):
        federate(Toy(), public_data(), [pFedHR(), other], evaluation=1)


def test_a_selected_model_of_the_client_is_fine(tmp_path):
    federate(Toy(), public_data((24, 40)), [pFedHR(fine_tune_epochs=0), LocalCheckpoint()], tmp_path, evaluation=1)


@pytest.mark.parametrize(
    ("module", "data", "says"),
    [
        (Toy(), toy_data(), "pFedHR trains on public data, but the data module has none"),
        (Residual(), public_data(), r"pFedHR cannot take Residual apart into blocks.*blocks\(\)"),
        (two_models(), public_data(public=1), "needs two samples or more"),
    ],
    ids=["no public data", "residual", "one sample"],
)
def test_what_cannot_work_is_refused_before_round_1(module, data, says):
    with pytest.raises(ValueError, match=says):
        federate(module, data, [pFedHR()])
