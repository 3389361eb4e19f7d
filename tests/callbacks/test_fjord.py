"""FjORD: algorithms-2, entry 2.4. What it shares with the other sub-model methods is in test_partial_training.py."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from fedlightning.algorithm import ModelSelection
from fedlightning.callbacks import FedAvg, FjORD
from fedlightning.callbacks.fjord import distillation_loss
from fedlightning.seeding import generator
from fedlightning.tensors import module_state
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import NormNet, Toy, close, differs, federate, global_state, same, spied, toy_data

ONE = {"widths": [1.0], "rates": [1.0]}
CASES = {
    "FjORD": Case(
        FjORD(head="head"),
        neutral=FjORD(**ONE, head="head"),
        skip={"identical_clients": "its clients differ in width"},
    ),
    "FjORD plain": Case(
        FjORD(rates=[0.6], distillation=False, head="head"),
        skip={**NO_PLAIN_FORM, "identical_clients": "each client draws widths of its own"},
    ),
}
KEPT = {"FjORD": Kept("FjORD", options={"head": "net.3"})}


class TwoNorms(Toy):
    """The second layer sees other features at every width of the first."""

    def make(self, hidden, dropout):
        first, second = torch.nn.BatchNorm1d(hidden), torch.nn.BatchNorm1d(hidden)
        layers = [torch.nn.Linear(6, hidden), first, torch.nn.ReLU(), torch.nn.Linear(hidden, hidden), second]
        return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(hidden, 4))


class Look(ModelSelection):
    """Notes the model that each client is scored with."""

    def __init__(self):
        self.seen = []

    def on_client_evaluated(self, client, stage, split, metrics, module):
        self.seen.append((client.id, stage, module_state(module)))


def full_statistics(module, batches):
    """Means over the batches of a module's batch statistics at its full width."""
    module, names = copy.deepcopy(module).train(), ("running_mean", "running_var")
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm1d):
            layer.momentum = None
    for x in batches:
        module(x)
    return {name: value for name, value in module_state(module).items() if name.endswith(names)}


@pytest.mark.parametrize("distillation", [False, True])
def test_one_width_for_all_is_training_of_that_part(distillation):
    """With one width below 1 there is nothing to draw or to distil: the rest of the model stays as it was."""
    module = Toy("adam")
    start = module_state(module)
    runs = [
        federate(module, toy_data(), [FjORD(widths=[0.5], rates=[0.5], distillation=d)]) for d in (distillation, False)
    ]
    same(*map(global_state, runs))
    new = global_state(runs[0])
    assert torch.equal(new["net.0.weight"][4:], start["net.0.weight"][4:])
    assert (new["net.0.weight"][:4] != start["net.0.weight"][:4]).any()


def test_a_width_is_a_prefix_of_every_larger_one():
    """Weights outside a width's prefix do not change what it computes."""
    method, module, x = FjORD(head="net.3"), Toy(hidden=10), torch.randn(4, 6, generator=generator("x"))
    before = {p: method.submodel(module, p)(x) for p in method.widths}
    for p in method.widths:
        changed = Toy(hidden=10)
        changed.load_state_dict(module.state_dict())
        with torch.no_grad():
            kept = math.ceil(p * 10)
            changed.net[0].weight[kept:] += 1.0
            changed.net[0].bias[kept:] += 1.0
            changed.net[3].weight[:, kept:] += 1.0
        for smaller in method.widths:
            assert torch.equal(method.submodel(changed, smaller)(x), before[smaller]) == (smaller <= p)


@pytest.mark.parametrize(
    ("distillation", "alpha", "temperature"), [(False, 1.0, 1.0), (True, 1.0, 1.0), (True, 0.3, 2.0)]
)
def test_three_rounds_are_what_the_formulas_say(distillation, alpha, temperature):
    """Three SGD steps a round in plain torch; widths are drawn from the address (seed, round, client, "widths")."""
    widths, p_max, sizes = [0.25, 0.5, 1.0], {"0": 1.0, "1": 0.5, "2": 0.25}, {"0": 24, "1": 24, "2": 16}
    module, data = Toy(lr=0.3), toy_data(sizes, batch_size=8, shuffle=False)
    method = FjORD(widths, p_max, distillation, alpha, temperature)
    found = federate(module, data, [method], max_rounds=3)
    names, w = list(module_state(module)), [value.clone() for value in module_state(module).values()]
    drawn = set()
    for j in range(3):
        sums, counts = ([torch.zeros_like(value) for value in w] for _ in range(2))
        for client, size in sizes.items():
            held = int(p_max[client] * 8)
            own = [v.clone().requires_grad_() for v in (w[0][:held], w[1][:held], w[2][:, :held], w[3])]
            choices = [p for p in widths if p <= p_max[client]]
            draw = generator(0, j, client, "widths")
            for x, y in zip(*(t.split(8) for t in data.tensors[client]["train"]), strict=True):
                p = choices[int(torch.randint(len(choices), (), generator=draw))] if len(choices) > 1 else choices[0]
                drawn.add((client, p))

                def logits(share, x=x, own=own):
                    k = int(share * 8)
                    return F.linear(F.linear(x, own[0][:k], own[1][:k]).relu(), own[2][:, :k], own[3])

                loss = F.cross_entropy(logits(p), y)
                if distillation and len(choices) > 1:
                    full = logits(p_max[client])
                    soft = (full.detach() / temperature).softmax(1)
                    kl = (soft * (soft.log() - (logits(p) / temperature).log_softmax(1))).sum(1).mean()
                    loss = F.cross_entropy(full, y) + (1 - alpha) * loss + alpha * temperature**2 * kl
                own = [
                    (v - module.lr * g).detach().requires_grad_()
                    for v, g in zip(own, torch.autograd.grad(loss, own), strict=True)
                ]
            for value, total, count, where in zip(own, sums, counts, (0, 0, 1, None), strict=True):
                for target, term in ((total, size * value.detach()), (count, torch.full_like(value, size))):
                    (target if where is None else target.narrow(where, 0, held)).add_(term)
        w = [torch.where(n > 0, s / n.clamp_min(1), old) for s, n, old in zip(sums, counts, w, strict=True)]
    assert len(drawn) > 4
    close(global_state(found), dict(zip(names, w, strict=True)), atol=3e-6)


def test_the_distillation_term_is_the_formula():
    logits, teacher = torch.tensor([[0.2, -1.0, 3.0]]), torch.tensor([[1.0, 0.5, -2.0]])
    p, q = (teacher / 3.0).softmax(1), (logits / 3.0).softmax(1)
    expected = 0.4 * 1.7 + 0.6 * 9.0 * float((p * (p.log() - q.log())).sum())
    assert float(distillation_loss(torch.tensor(1.7), logits, teacher, 0.6, 3.0)) == pytest.approx(expected, rel=1e-6)
    teacher.requires_grad_()
    loss = distillation_loss(torch.tensor(1.7), logits.requires_grad_(), teacher, 0.6, 3.0)
    assert torch.autograd.grad(loss, [logits, teacher], allow_unused=True)[1] is None


def test_a_client_touches_its_units_only():
    module = Toy()
    trainer, spy = spied(module, toy_data(), [FjORD(rates=[0.4, 0.2, 0.4])], max_rounds=2)
    start, new = module_state(module), global_state(trainer)
    kept = math.ceil(0.4 * 8)
    assert torch.equal(new["net.0.weight"][kept:], start["net.0.weight"][kept:])
    assert torch.equal(new["net.3.weight"][:, kept:], start["net.3.weight"][:, kept:])
    assert [u.state["net.0.bias"].numel() for u in spy.updates] == [4, 2, 4] * 2


def test_with_batchnorm_every_deployed_width_has_statistics_of_its_own():
    data = toy_data(batch_size=64)
    trainer = federate(NormNet(), data, [FjORD(rates=[0.4])], max_rounds=2)
    for client in trainer.server.clients:
        state, x = module_state(trainer.module(client)), data.tensors[client]["train"][0]
        hidden = F.linear(x, state["net.0.weight"], state["net.0.bias"])
        assert hidden.shape[1] == 4
        torch.testing.assert_close(state["net.1.running_mean"], hidden.mean(0))


def test_the_step_at_the_drawn_width_leaves_the_statistics_of_the_largest_alone():
    """Without a learning rate the weights stand still: what moves are the statistics, as they do in FedAvg."""
    data, module = toy_data(batch_size=8, shuffle=False), NormNet(lr=0.0)
    runs = [spied(module, data, [method], max_rounds=1)[1] for method in (FjORD([0.5, 1.0], [1.0]), FedAvg())]
    sent = [[update.state for update in spy.updates if not update.tag] for spy in runs]
    for found, expected in zip(*sent, strict=True):
        same(found, expected)
        assert differs(expected, module_state(module))


def test_the_step_at_the_drawn_width_knows_the_number_of_its_batch():
    seen = []

    class Noted(Toy):
        def training_step(self, batch, batch_idx):
            seen.append((float(batch[0].sum()), batch_idx))
            return super().training_step(batch, batch_idx)

    data = toy_data({"0": 32}, batch_size=8, shuffle=False)
    federate(Noted(), data, [FjORD(rates=[1.0])], max_rounds=1)
    assert set(seen) == {(float(x.sum()), number) for number, x in enumerate(data.tensors["0"]["train"][0].split(8))}
    assert len(seen) > 4


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_a_full_client_is_scored_with_statistics_of_the_full_width(buffers):
    """Training leaves a mixture of several widths: the server replaces it, or it is estimated anew."""
    data, look, module = toy_data({"0": 32, "1": 32}, batch_size=8, shuffle=False), Look(), TwoNorms(lr=0.0)
    method = FjORD([0.5, 1.0], [1.0], distillation=False)
    federate(module, data, [method, look], max_rounds=2, evaluation=1, float_buffers=buffers)
    own = {client: full_statistics(module, data.tensors[client]["train"][0].split(8)) for client in ("0", "1")}
    mean = {name: (own["0"][name] + own["1"][name]) / 2 for name in own["0"]}
    assert {stage for _, stage, _ in look.seen} == {"L1", "L2"}
    for client, stage, state in look.seen:
        expected = mean if stage == "L1" and buffers == "average" else own[client]
        close({name: state[name] for name in expected}, expected, atol=1e-5, rtol=1e-4)


def test_what_is_verified_are_the_widths_at_which_a_client_computes():
    class Even(Toy):
        def logits(self, x):
            hidden = self.net[0](x)
            assert hidden.shape[1] % 2 == 0, "an odd width"
            return self.net[3](hidden.relu())

    with pytest.raises(ValueError, match="A sub-model of Even does not run: an odd width"):
        federate(Even(), toy_data(), [FjORD(widths=[0.375, 1.0], rates=[1.0])])
    federate(Even(), toy_data(), [FjORD(widths=[0.25, 0.5, 0.625], rates=[0.5])], max_rounds=1)


def test_the_fast_loop_and_the_trainer_train_the_same():
    module = NormNet("adam")
    runs = [federate(module, toy_data(), [FjORD(rates=[1.0, 0.6])], local_loop=loop) for loop in ("fast", "trainer")]
    same(*map(global_state, runs))
    assert differs(global_state(runs[0]), module_state(module))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"widths": []}, r"widths=\[\]\. Use a list of at least one"),
        ({"widths": [0.5, 1.2]}, r"widths=\[0.5, 1.2\]. Use a list of at least one, each a number in \(0, 1\]"),
        ({"rates": [0.5]}, r"largest width 0.5, which is none of widths=.*Add it there"),
        ({"alpha": 1.5}, r"alpha=1.5. Use a number in \[0, 1\]"),
        ({"temperature": 0.0}, r"temperature=0.0. Use a number in \(0, inf\)"),
    ],
)
def test_wrong_use_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        FjORD(**arguments)


def test_one_logit_cannot_be_distilled():
    class Single(Toy):
        def make(self, hidden, dropout):
            return torch.nn.Sequential(torch.nn.Linear(6, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))

        def training_step(self, batch, batch_idx):
            return F.binary_cross_entropy_with_logits(self(batch[0]).flatten(), (batch[1] > 0).float())

        def score(self, batch, split):
            self.log(f"{split}_loss", self.training_step(batch, 0))

    with pytest.raises(ValueError, match=r"a logit for each class, and the head gives one. Use distillation=False"):
        federate(Single(), toy_data(), [FjORD()])
    federate(Single(), toy_data(), [FjORD(distillation=False)], max_rounds=1)
