"""Per-FedAvg: sheet entry 11."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning import FederatedCallback
from fedlightning.callbacks import FedAvg, FedProx, PerFedAvg
from fedlightning.callbacks.per_fedavg import hessian_times
from fedlightning.contract import Phase
from fedlightning.tensors import clone, module_state
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Quadratic, Toy, close, differs, federate, global_state, same, spied, toy_data

CASES = {
    "PerFedAvg": Case(PerFedAvg(alpha=0.1), neutral=PerFedAvg(alpha=0.0)),
    "PerFedAvg FO": Case(PerFedAvg(alpha=0.1, variant="FO"), neutral=PerFedAvg(alpha=0.0, variant="FO")),
    "PerFedAvg exact": Case(PerFedAvg(alpha=0.1, variant="exact"), neutral=PerFedAvg(alpha=0.0, variant="exact")),
}
KEPT = {"PerFedAvg": Kept("PerFedAvg")}

VARIANTS = ["exact", "HF", "FO"]
MATRIX = torch.tensor([[2.0, 0.3, 0.1], [0.3, 1.0, -0.2], [0.1, -0.2, 1.5]], dtype=torch.float64)
B = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


class Bowl(Quadratic):
    """``1/2 w'Aw - b'w`` whatever the batch is."""

    def training_step(self, batch, batch_idx):
        return 0.5 * self.w @ MATRIX @ self.w - B @ self.w


def bowl(lr=0.2):
    module = Bowl(lr=lr)
    with torch.no_grad():
        module.w.copy_(torch.tensor([0.7, -0.4, 1.1]))
    return module


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("make", [lambda: Toy("sgd", dropout=0.2), lambda: NormNet("momentum")])
def test_without_an_inner_step_it_is_uniform_fedavg(make, variant):
    """(a)"""
    module, data = make(), toy_data()
    runs = [FedAvg("uniform"), PerFedAvg(alpha=0.0, variant=variant)]
    same(*(global_state(federate(module, data, [cb], max_rounds=2, local_epochs=2)) for cb in runs))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_outer_gradient_of_a_quadratic(variant):
    """(b): ``(I - alpha A)(A (w - alpha (A w - b)) - b)``; Hessian-free is exact for any delta."""
    alpha, eye = 0.3, torch.eye(3, dtype=torch.float64)
    for delta in (1e-3, 0.5) if variant == "HF" else (1e-3,):
        module = bowl()
        trainer = federate(module, toy_data([8]), [PerFedAvg(alpha, variant, delta)], max_rounds=3, local_steps=2)
        w = module.w.detach().clone()
        for _ in range(6):
            r = MATRIX @ (w - alpha * (MATRIX @ w - B)) - B
            w = w - 0.2 * ((eye if variant == "FO" else eye - alpha * MATRIX) @ r)
        torch.testing.assert_close(global_state(trainer)["w"], w, atol=1e-9, rtol=0)


def test_on_a_linear_loss_first_order_is_exact():
    """(c)"""

    class Slope(Quadratic):
        def training_step(self, batch, batch_idx):
            return (batch[0][:, :3].double() @ self.w).mean()

    data = toy_data([16, 24])
    runs = [federate(Slope(), data, [PerFedAvg(0.3, variant)], max_rounds=2) for variant in VARIANTS]
    same(global_state(runs[0]), global_state(runs[2]))
    close(global_state(runs[0]), global_state(runs[1]), atol=1e-9)
    assert float(global_state(runs[0])["w"].abs().max()) > 0


def smooth():
    torch.manual_seed(3)
    return Smooth().double()


class Smooth(Toy):
    def make(self, hidden, dropout):
        return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))

    def forward(self, x):
        return self.net(x.to(next(self.parameters()).dtype))


def test_hessian_free_error_is_quadratic_in_delta():
    """(e)"""
    data = toy_data([16])
    exact = global_state(federate(smooth(), data, [PerFedAvg(0.5, "exact")], max_rounds=1, local_steps=1))
    errors = []
    for delta in (0.4, 0.2, 0.1):
        found = global_state(federate(smooth(), data, [PerFedAvg(0.5, "HF", delta)], max_rounds=1, local_steps=1))
        errors.append(max(float((found[name] - exact[name]).abs().max()) for name in exact))
    assert errors[0] > 1e-8
    assert errors[1] / errors[0] == pytest.approx(0.25, abs=0.05)
    assert errors[2] / errors[1] == pytest.approx(0.25, abs=0.03)


def test_double_backward_is_the_hessian():
    module, (x, y) = smooth(), toy_data([8]).tensors["0"]["train"]
    parameters = dict(module.named_parameters())
    vector = {name: torch.randn_like(p) for name, p in parameters.items()}

    def loss_of(*values):
        state = dict(zip(parameters, values, strict=True))
        return F.cross_entropy(torch.func.functional_call(module, state, (x.double(),)), y)

    _, product = torch.autograd.functional.hvp(loss_of, tuple(parameters.values()), tuple(vector.values()))
    for scale in (1.0, 1024.0):
        found = hessian_times(module, (x, y), vector, scale)
        close(found, dict(zip(parameters, product, strict=True)), atol=1e-10)


class Batches(FederatedCallback):
    """Hears which batches are drawn from which stream, and which one the loop gives."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, pl_module):
        client, draw = self.client, self.client.next_batch
        client.next_batch = lambda stream="extra": self.heard(stream, draw(stream))

    def heard(self, stream, batch):
        self.seen.append((stream, batch[0].clone()))
        return batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(("loop", batch[0].clone()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_independent_batches(variant):
    """One step's D, D', D'' by hand, with dropout off: first order and exact on a smooth net."""
    module, spy = smooth(), Batches()
    data = toy_data([40])
    trainer = federate(module, data, [spy, PerFedAvg(0.4, variant)], max_rounds=1, local_steps=1)
    batches = dict(spy.seen)
    assert set(batches) == {"loop", "inner"} | ({"hessian"} if variant != "FO" else set())
    assert len({tuple(b.flatten().tolist()) for b in batches.values()}) == len(batches)
    x, y = data.tensors["0"]["train"]

    def batch_of(stream):
        rows = [int((x == row).all(1).nonzero()[0]) for row in batches[stream]]
        return x[rows].double(), y[rows]

    w = [p.detach().clone().requires_grad_() for p in module.parameters()]

    def gradient(at, stream, **options):
        names = [name for name, _ in module.named_parameters()]
        inputs, labels = batch_of(stream)
        state = dict(zip(names, at, strict=True))
        loss = F.cross_entropy(torch.func.functional_call(module, state, (inputs,)), labels)
        return torch.autograd.grad(loss, at, **options)

    wt = [(p - 0.4 * g).detach().requires_grad_() for p, g in zip(w, gradient(w, "inner"), strict=True)]
    r = gradient(wt, "loop")
    h = [torch.zeros_like(p) for p in w]
    if variant != "FO":
        g = gradient(w, "hessian", create_graph=True)
        h = torch.autograd.grad(sum((a * b).sum() for a, b in zip(g, r, strict=True)), w)
    for (name, _), p, a, b in zip(module.named_parameters(), w, r, h, strict=True):
        torch.testing.assert_close(global_state(trainer)[name], (p - 0.1 * (a - 0.4 * b)).detach(), atol=1e-7, rtol=0)


def test_accumulated_batches_are_one_step():
    """Two batches of 8 at one wt are one of 16, on a quadratic (whose batches all say the same)."""
    data, callback = toy_data([16], batch_size=8), PerFedAvg(0.3, "exact")
    runs = [
        federate(bowl(), data, [callback], max_rounds=1, local_steps=1, **options)
        for options in ({}, {"accumulate_grad_batches": 2})
    ]
    close(*map(global_state, runs), atol=1e-12)


def test_statistics_move_with_the_training_batches_only():
    """The buffers' number of updates is the number of outer steps, and first order leaves no other trace in them."""
    module, data = NormNet("sgd", lr=0.0), toy_data()
    plain = federate(module, data, [FedAvg("uniform")], max_rounds=2)
    for variant in VARIANTS:
        same(global_state(plain), global_state(federate(module, data, [PerFedAvg(1e-30, variant)], max_rounds=2)))


class Momentary(NormNet):
    """Says where every forward pass of training was made."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def test_the_inner_step_has_no_momentum():
    """Two runs that differ in the outer momentum only take the same first inner step: w - alpha g."""
    data, alpha = toy_data([16]), 0.3
    runs = []
    for make in (NormNet, Momentary):
        seen = []

        class At(FederatedCallback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx, seen=seen):
                seen.append(clone(module_state(pl_module)))

        module = make("sgd")
        module.load_state_dict(NormNet("sgd").state_dict()) if not runs else module.load_state_dict(runs[0][0])
        start = clone(module_state(module))
        federate(module, data, [PerFedAvg(alpha, "FO"), At()], max_rounds=1, local_steps=2)
        runs.append((start, seen))
    close(runs[0][1][0], runs[1][1][0], atol=0, rtol=0)
    assert differs(runs[0][0], runs[0][1][0])


# -- what is deployed ------------------------------------------------------------------------------------------------


def test_the_deployed_model_is_one_step_on_training_data():
    module, data = NormNet("sgd"), toy_data()
    trainer = federate(module, data, [PerFedAvg(alpha=0.2)], max_rounds=2)
    w = global_state(trainer)
    for client in "012":
        deployed = module_state(trainer.client(client).module)
        assert all(torch.equal(deployed[n], w[n]) for n in w if "running" in n or "num_" in n)

        moved = {n: deployed[n] - w[n] for n, _ in module.named_parameters()}
        assert max(float(m.abs().max()) for m in moved.values()) > 1e-4
    plain, free = Toy("sgd"), toy_data()
    trainer = federate(plain, free, [PerFedAvg(alpha=0.2)], max_rounds=1)
    for client in "012":  # without normalisation the mean gradient does not depend on the batches
        model = copy.deepcopy(plain)
        model.load_state_dict(global_state(trainer))
        F.cross_entropy(model(free.tensors[client]["train"][0]), free.tensors[client]["train"][1]).backward()
        expected = {n: (p - 0.2 * p.grad).detach() for n, p in model.named_parameters()}
        close(module_state(trainer.client(client).module), expected, atol=1e-6)


def test_test_data_do_not_matter(tmp_path):
    module = Toy("sgd")
    runs = [
        federate(module, toy_data(test=size), [PerFedAvg()], root=tmp_path / str(size), max_rounds=2)
        for size in (12, 30)
    ]
    for client in "012":
        same(*(module_state(run.client(client).module) for run in runs))


@pytest.mark.slow
def test_evaluation_does_not_change_w(tmp_path):
    """(d)"""
    module, data = NormNet("sgd", dropout=0.0), toy_data()
    often = federate(module, data, [PerFedAvg()], root=tmp_path, max_rounds=3, evaluation=1)
    never = federate(module, data, [PerFedAvg()], max_rounds=3)
    same(global_state(often), global_state(never))


def test_a_last_batch_of_one_under_normalisation_does_not_stop_evaluation(tmp_path):
    """Training on it fails by rule; the deployed model of that client is w."""
    with pytest.warns(UserWarning, match="client '1'"):
        trainer = federate(NormNet("sgd"), toy_data((16, 9)), [PerFedAvg()], root=tmp_path, max_rounds=1)
    same(module_state(trainer.client("1").module), global_state(trainer))


@pytest.mark.slow
def test_it_learns_to_adapt():
    """Clients with opposite targets: after one step the meta-model serves each better than FedAvg's model does."""
    module, data = Toy("sgd", lr=0.1), toy_data((24, 24, 24))
    trainer = federate(module, data, [PerFedAvg(alpha=0.1)], max_rounds=15)
    start = loss(data, {c: module_state(module) for c in "012"})
    w = loss(data, {c: global_state(trainer) for c in "012"})
    adapted = loss(data, {c: module_state(trainer.client(c).module) for c in "012"})
    assert adapted < w < 0.8 * start


def loss(data, states):
    total = 0.0
    for client, state in states.items():
        model = Toy("sgd")
        model.load_state_dict(state)
        x, y = data.tensors[client]["train"]
        total += F.cross_entropy(model(x), y).item()
    return total


def test_composes_with_a_correction_at_w():
    """FedProx pulls at w, not at wt: with one step it has nothing to pull."""
    module, data = Toy("sgd"), toy_data()
    runs = [federate(module, data, cb, max_rounds=2, local_steps=1)
            for cb in ([PerFedAvg(0.3, "FO")], [PerFedAvg(0.3, "FO"), FedProx(5.0)])]  # fmt: skip
    same(*map(global_state, runs))


def test_wrong_use_is_refused():
    class Manual(Toy):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match="Manual optimizes manually"):
        federate(Manual(), toy_data(), [PerFedAvg()])
    with pytest.warns(UserWarning, match="optimizer is Adam. Another rescales the meta-gradient"):
        federate(Toy("adam"), toy_data(), [PerFedAvg()], max_rounds=1)
    for options in ({"variant": "hf"}, {"alpha": -1.0}, {"delta": 0.0}):
        with pytest.raises(ValueError, match=rf"PerFedAvg got .*{next(iter(options))}="):
            PerFedAvg(**options)


class Dropped(Smooth):
    def make(self, hidden, dropout):
        return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Dropout(0.5), nn.Linear(hidden, 3))


def test_both_sides_of_the_difference_drop_the_same_units():
    """Else the difference of two masks, divided by 2 delta, would drown the Hessian."""
    torch.manual_seed(3)
    module, data = Dropped().double(), toy_data([16])
    exact, free = (
        global_state(federate(module, data, [PerFedAvg(0.5, variant)], max_rounds=1, local_steps=2))
        for variant in ("exact", "HF")
    )
    close(exact, free, atol=1e-6)


def test_streams_keep_the_loaders_rules():
    """drop_last: no batch of one sample, which batch normalisation cannot take."""
    module, data = NormNet("sgd"), toy_data([17], drop_last=True)
    trainer = federate(module, data, [PerFedAvg()], max_rounds=1, local_epochs=3)
    assert differs(global_state(trainer), module_state(module))


class OwnPhase(FederatedCallback):
    """An ordinary fit beside the federated one."""

    def local_phases(self, client):
        return [Phase("own", federated=False, keep_as=self.keep), Phase()]

    def keep(self, client):
        client.state[self.key] = {"own": client.model_state()}


def test_a_phase_that_is_not_federated_is_ordinary_training():
    module, data = Toy("sgd"), toy_data([24])
    _, spy = spied(module, data, [OwnPhase(), PerFedAvg(0.3)], max_rounds=1)
    _, plain = spied(module, data, [OwnPhase()], max_rounds=1)
    same(*(s.records[0]["0"].state["OwnPhase"]["own"] for s in (spy, plain)))
    assert differs(spy.rounds[0], plain.rounds[0])
    same(spy.rounds[0], global_state(federate(module, data, [PerFedAvg(0.3, "HF")], max_rounds=1)))


class Outer(FederatedCallback):
    """Hears the gradient that the step is taken along."""

    rank = 1

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.found = {name: p.grad.clone() for name, p in pl_module.named_parameters()}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_hessian_term_in_low_precision(precision):
    """Against plain torch in fp32 and by double backward: the Hessian-free difference keeps its digits under autocast."""
    torch.manual_seed(1)
    module, data, alpha = Smooth("sgd", lr=0.1, hidden=16).float(), toy_data([8], batch_size=8), 2.0
    found = {}
    for variant in ("FO", "HF"):
        heard = Outer()
        federate(module, data, [heard, PerFedAvg(alpha, variant)], max_rounds=1, local_steps=1, precision=precision)
        found[variant] = heard.found
    inputs, labels = data.tensors["0"]["train"]
    parameters = dict(module.named_parameters())

    def loss_of(*values):
        state = dict(zip(parameters, values, strict=True))
        return F.cross_entropy(torch.func.functional_call(module, state, (inputs,)), labels)

    r = tuple(found["FO"][name] for name in parameters)
    _, product = torch.autograd.functional.hvp(loss_of, tuple(parameters.values()), r)
    term = torch.cat([(found["FO"][n] - found["HF"][n]).flatten() / alpha for n in parameters])
    exact = torch.cat([p.flatten() for p in product])
    assert float((term - exact).norm() / exact.norm()) < 0.02


def test_parameters_in_half_precision_are_refused():
    with pytest.raises(ValueError, match=r"half precision cannot resolve.*bf16-mixed"):
        federate(Toy(), toy_data([8]), [PerFedAvg()], precision="bf16-true")
