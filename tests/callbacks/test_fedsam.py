"""FedSAM and FedASAM: sheet entry C6."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F

from fedlightning import FederatedCallback
from fedlightning.callbacks import (
    MAPPER,
    MOON,
    SCAFFOLD,
    FedAvg,
    FedProx,
    FedSAM,
    PerFedAvg,
    PLayerFL,
    pFedBayes,
    pFedMe,
)
from fedlightning.tensors import module_state
from fedlightning.testing.pairs import check_pair
from tests.callbacks.common import MAKES, batches, cut_and_resumed
from tests.conformance.case import Case, Kept
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

CASES = {
    "FedSAM": Case(FedSAM(rho=0.05), neutral=FedSAM(rho=0.0)),
    "FedSAM adaptive": Case(FedSAM(rho=0.5, adaptive=True), neutral=FedSAM(rho=0.0, adaptive=True)),
}
KEPT = {"FedSAM": Kept("FedSAM")}


def test_the_perturbation_by_hand():
    """(b): also over several tensors, whose norm is one."""
    e = FedSAM(rho=0.05).perturbation({"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])})
    torch.testing.assert_close(e["w"], torch.tensor([0.03, 0.04]))
    g = {"a.weight": torch.tensor([[3.0]]), "a.bias": torch.tensor([4.0])}
    e = FedSAM(rho=0.05).perturbation(g, g)
    assert [round(float(value.sum()), 6) for value in e.values()] == [0.03, 0.04]
    e = FedSAM(rho=0.05).perturbation(g, {"a.bias": torch.zeros(1)})
    assert e["a.bias"].tolist() == [0.0]  # no direction


def test_the_adaptive_perturbation_by_hand():
    """``T = |w| + eta`` for weights, 1 for biases: ``rho T^2 g / ||T g||``."""
    w = {"a.weight": torch.tensor([1.0, -3.0]), "a.bias": torch.tensor([5.0])}
    g = {"a.weight": torch.tensor([2.0, -1.0]), "a.bias": torch.tensor([2.0])}
    e = FedSAM(rho=0.5, adaptive=True, eta=0.5).perturbation(w, g)
    length = (3.0**2 + 3.5**2 + 2.0**2) ** 0.5
    torch.testing.assert_close(e["a.weight"], 0.5 * torch.tensor([1.5**2 * 2.0, 3.5**2 * -1.0]) / length)
    torch.testing.assert_close(e["a.bias"], torch.tensor([0.5 * 2.0 / length]))


def test_where_all_weights_are_alike_adaptive_is_sam():
    """(f): ``|w| + eta = 1``."""
    w, g = {"a.weight": torch.full((3,), -0.8)}, {"a.weight": torch.tensor([1.0, -2.0, 0.5])}
    close(FedSAM(rho=0.3, adaptive=True).perturbation(w, g), FedSAM(rho=0.3).perturbation(w, g), atol=1e-7)


@pytest.mark.parametrize("make", MAKES)
def test_without_strength_it_is_fedavg(make):
    """(a): bit for bit by the early exit; nearly through both passes, with the same dropout and running statistics."""
    module, data = make(), toy_data()
    plain, none = (
        global_state(federate(module, data, [cb], max_rounds=2, local_epochs=2)) for cb in (FedAvg(), FedSAM(rho=0.0))
    )
    same(plain, none)
    tiny = global_state(federate(module, data, [FedSAM(rho=1e-30)], max_rounds=2, local_epochs=2))
    close(tiny, plain, atol=1e-6)
    assert differs(plain, global_state(federate(module, data, [FedSAM()], max_rounds=2, local_epochs=2)))


def test_a_quadratic_steps_with_the_gradient_a_step_further():
    """(c): ``a (w + rho sign(g) - b)``."""
    a, b, rho, lr, w = 2.0, 0.5, 0.3, 0.1, 0.0
    trained = federate(Quadratic(lr=lr, size=1), quadratic_data([[a]], [[b]]), [FedSAM(rho=rho)], local_steps=3)
    for _ in range(6):
        slope = a * (w - b)
        w -= lr * a * (w + rho * (slope > 0) - rho * (slope < 0) - b)
    assert global_state(trained)["w"].item() == pytest.approx(w, abs=1e-12)


def test_one_step_moves_by_the_mean_perturbed_gradient():
    """(e): FedSGD with two clients."""
    a, b = [[1.0, 2.0], [3.0, 0.4]], [[1.0, -1.0], [-2.0, 3.0]]
    trained = federate(Quadratic(lr=0.1, size=2), quadratic_data(a, b), [FedSAM(rho=0.3)], max_rounds=1, local_steps=1)
    moved = torch.zeros(2).double()
    for slope, best in zip(*(torch.tensor(rows, dtype=torch.float64) for rows in (a, b)), strict=True):
        g = -slope * best
        moved += slope * (0.3 * g / g.norm() - best) / 2
    torch.testing.assert_close(global_state(trained)["w"], -0.1 * moved, atol=1e-12, rtol=0)


def by_hand(module, data, client, start, number, rho, adaptive, window=1, clip=None, mu=0.0):
    """SAM in plain torch over two epochs; the steps of ``window`` batches, clipped, with FedProx's pull."""
    model = copy.deepcopy(module)
    model.load_state_dict(start)
    optimizer, parameters = model.configure_optimizers(), list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    begin = [p.detach().clone() for p in parameters]

    def gradient(chunk):
        total = [torch.zeros_like(p) for p in parameters]
        for x, y in chunk:
            for sum_, g in zip(total, torch.autograd.grad(F.cross_entropy(model(x), y), parameters), strict=True):
                sum_ += g / window
        return total

    over = list(batches(data, client, round=number, epochs=2))
    half = len(over) // 2
    for epoch in (over[:half], over[half:]):
        for at in range(0, len(epoch), window):
            g = gradient(epoch[at : at + window])
            kept = [b.clone() for b in model.buffers()]
            with torch.no_grad():
                y = [p.clone() for p in parameters]
                scale = [
                    p.abs() + 0.2 if adaptive and n.endswith("weight") else 1.0 for n, p in zip(names, y, strict=True)
                ]
                norm = torch.sqrt(sum((t * one).square().sum() for t, one in zip(scale, g, strict=True)))
                for p, t, one in zip(parameters, scale, g, strict=True):
                    p += rho * t * t * one / norm
            gs = gradient(epoch[at : at + window])
            with torch.no_grad():
                for p, old in zip(parameters, y, strict=True):
                    p.copy_(old)
                for buffer, old in zip(model.buffers(), kept, strict=True):
                    buffer.copy_(old)
            for p, one, anchor in zip(parameters, gs, begin, strict=True):
                p.grad = one + mu * (p.detach() - anchor)
            if clip:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
    return module_state(model)


@pytest.mark.parametrize("loop", ["fast", "trainer"])
@pytest.mark.parametrize("make", [lambda: Toy("adam"), lambda: NormNet("momentum")])
@pytest.mark.parametrize("adaptive", [False, True])
def test_training_is_what_the_formulas_say(make, adaptive, loop):
    """With batch normalisation: the second pass leaves running statistics as the first made them."""
    module, data = make(), toy_data()
    _, spy = spied(module, data, [FedSAM(rho=0.2, adaptive=adaptive)], max_rounds=2, local_epochs=2, local_loop=loop)
    starts = [module.state_dict(), spy.rounds[0]]
    for update in spy.updates:
        expected = by_hand(module, data, update.client, starts[update.round], update.round, 0.2, adaptive)
        close(update.state, expected, atol=5e-6)


@pytest.mark.parametrize(
    ("callbacks", "trainer", "hand"),
    [
        ([], {"accumulate_grad_batches": 2}, {"window": 2}),
        ([], {"gradient_clip_val": 0.2}, {"clip": 0.2}),
        ([FedProx(mu=0.7)], {"gradient_clip_val": 0.2, "accumulate_grad_batches": 2}, {"window": 2, "clip": 0.2, "mu": 0.7}),
    ],
    ids=["accumulated", "clipped", "all"],
)  # fmt: skip
def test_accumulation_clipping_and_corrections(callbacks, trainer, hand):
    """Corrections act on ``gs``, which is clipped then; five batches in windows of two leave a last window of one."""
    module, data = Toy("sgd"), toy_data()
    _, spy = spied(module, data, [*callbacks, FedSAM(rho=0.2)], max_rounds=1, local_epochs=2, **trainer)
    for update in spy.updates:
        expected = by_hand(module, data, update.client, module.state_dict(), 0, 0.2, False, **hand)
        close(update.state, expected, atol=5e-6)


SEEN = []
"""What steps of Noise write down: a pass beside training leaves no trace in the module itself."""


class Noise(Toy):
    """Its loss has a random factor, which it writes down."""

    def training_step(self, batch, batch_idx):
        factor = torch.rand(()) + torch.rand(3).sum()
        SEEN.append((float(factor), batch_idx, batch[0].clone(), module_state(self)["net.0.weight"].clone()))
        return factor * super().training_step(batch, batch_idx)


def test_both_passes_of_a_step_see_the_same_batch_and_randomness():
    SEEN.clear()
    federate(Noise(), toy_data([24]), [FedSAM(rho=0.2)], max_rounds=1, local_epochs=2)
    steps = SEEN[-12:]
    assert len(steps) == 12 and len({factor for factor, *_ in steps}) == 6
    for (factor, index, x, w), (again, same_index, same_x, perturbed) in zip(steps[::2], steps[1::2], strict=True):
        assert (factor, index) == (again, same_index) and torch.equal(x, same_x)
        assert not torch.equal(w, perturbed)


def test_the_run_has_the_random_numbers_that_it_has_without():
    """Masks of later batches are those of a run whose perturbation is nothing."""
    module, data = Toy("sgd", dropout=0.5), toy_data()
    close(
        *(global_state(federate(module, data, [cb], max_rounds=2, local_epochs=3)) for cb in (FedAvg(), FedSAM(rho=1e-30))),
        atol=1e-6,
    )  # fmt: skip


class Gradients(FederatedCallback):
    """Notes gradients and parameters right before the optimizer's step."""

    rank = 5

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        state = module_state(pl_module)
        self.seen.append(
            ({n: p.grad.clone() for n, p in pl_module.named_parameters()}, {n: v.clone() for n, v in state.items()})
        )


def test_parameters_are_restored_exactly():
    """(d)."""

    class Before(Gradients):
        rank = 0

    before, after = Before(), Gradients()
    federate(NormNet("sgd"), toy_data(), [FedSAM(rho=0.5), before, after], max_rounds=1)
    assert before.seen
    for (g, y), (gs, again) in zip(before.seen, after.seen, strict=True):
        same(y, again)
        assert differs(g, gs)


def test_terms_in_the_loss_belong_to_the_perturbed_gradient():
    """MOON's term in both passes: with a constant term in the loss the second gradient has it too."""

    class Pull(FederatedCallback):
        def training_loss(self, client, module, batch, loss, features):
            return loss + sum((0.5 * p.square().sum() for p in module.parameters()), start=torch.zeros(()))

    module, data = Toy("sgd"), toy_data([8])
    trained = global_state(federate(module, data, [FedSAM(rho=0.2), Pull()], max_rounds=1, local_steps=1))
    (x, y) = next(iter(batches(data, "0")))

    def gradient(model):
        loss = F.cross_entropy(model(x), y) + 0.5 * sum(p.square().sum() for p in model.parameters())
        return torch.autograd.grad(loss, list(model.parameters()))

    there = copy.deepcopy(module)
    g = gradient(there)
    norm = torch.sqrt(sum(one.square().sum() for one in g))
    with torch.no_grad():
        for p, one in zip(there.parameters(), g, strict=True):
            p += 0.2 * one / norm
    expected = {n: p - 0.1 * one for (n, p), one in zip(module.named_parameters(), gradient(there), strict=True)}
    close(trained, expected, atol=1e-6)


def fp16(**options):
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, **options))]}


def test_mixed_precision_steps_with_unscaled_gradients():
    """Without autocast's rounding the loss scale must not be seen."""
    close(
        *(global_state(federate(Quadratic(lr=0.2).float(), toy_quadratic(), [FedSAM(rho=0.3)], local_epochs=4, **options))
          for options in ({}, fp16())), atol=1e-5,
    )  # fmt: skip
    for precision in ("bf16-mixed", "bf16-true"):
        trained = global_state(federate(Toy("sgd"), toy_data(), [FedSAM()], max_rounds=1, precision=precision))
        assert all(torch.isfinite(value).all() for value in trained.values())


def toy_quadratic():
    data = quadratic_data([[1.0, 2.0, 0.5], [3.0, 0.4, 1.0]], [[1.0, -1.0, 2.0], [-2.0, 3.0, 0.5]])
    for splits in data.tensors.values():
        for split, parts in splits.items():
            splits[split] = tuple(part.float() for part in parts)
    return data


class Cliff(Toy):
    """Its gradient overflows: in every pass, or only in passes away from the model at the first step."""

    def __init__(self, when):
        super().__init__("sgd")
        self.when, self.passes = when, 0

    def training_step(self, batch, batch_idx):
        self.passes += 1
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if self.passes % 2 == self.when else loss


@pytest.mark.parametrize("when", [0, 1])
def test_a_gradient_that_overflows_does_not_poison_the_model(when):
    """In the first pass the scaler skips the step, and the model is as it was; in the second it goes on with ``g``."""
    data = toy_data([8])
    _, spy = spied(Cliff(when), data, [FedSAM(rho=0.2)], max_rounds=1, local_steps=1, **fp16())
    (update,) = spy.updates
    assert all(torch.isfinite(value).all() for value in update.state.values())
    assert update.steps == (0 if when else 1)


@pytest.mark.parametrize("other", [PerFedAvg(), pFedMe(), MAPPER(), pFedBayes()], ids=lambda callback: callback.key)
def test_methods_that_take_their_gradient_elsewhere_are_refused(other):
    for callbacks in ([FedSAM(), other], [other, FedSAM()]):
        with pytest.raises(ValueError, match=r"FedSAM takes the gradient of a step near .* elsewhere"):
            federate(Toy("sgd"), toy_data(), callbacks, max_rounds=1)


@pytest.mark.parametrize("other", [FedProx(mu=0.2), SCAFFOLD(), MOON(head="head")], ids=lambda callback: callback.key)
def test_the_order_of_the_list_says_nothing(other):
    """SCAFFOLD with FedSAM is FedGAMMA."""
    check_pair(FedSAM(), other)


def test_a_method_that_measures_gradients_sees_those_at_the_model():
    """PLayer-FL's sensitivity is of ``g``, in either order."""
    module, data, order = Toy("sgd", lr=1e-6), toy_data(), ["net.0", "net.3"]
    found = []
    for callbacks in ([PLayerFL(order=order)], [FedSAM(rho=5.0), PLayerFL(order=order)]):
        trainer = federate(module, data, callbacks, max_rounds=1)
        found.append(trainer.server.callbacks.find(PLayerFL).sensitivity(trainer.server).sensitivity)
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


class Manual(Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class ChangesGradients(Toy):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad *= 0.5


class GoesOn(Toy):
    """Keeps the mean of a batch for the next one."""

    before = 0.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step((batch[0] + self.before, batch[1]), batch_idx)
        self.before = batch[0].mean(0)
        return loss


def test_a_second_pass_that_would_begin_elsewhere_is_told_of():
    with pytest.warns(UserWarning, match=r"step of GoesOn goes on from what the one before has left"):
        federate(GoesOn(), toy_data([8]), [FedSAM()], max_rounds=1, sanity_check=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*goes on from what")
        for module, rho in ((GoesOn(), 0.0), (Toy(dropout=0.5), 0.1), (NormNet(dropout=0.5), 0.1)):
            federate(module, toy_data([8]), [FedSAM(rho=rho)], max_rounds=1, sanity_check=True)


def test_wrong_use_is_refused_or_warned_of():
    with pytest.raises(ValueError, match="rho=-1"):
        FedSAM(rho=-1)
    with pytest.raises(ValueError, match="eta=0"):
        FedSAM(eta=0)
    with pytest.raises(ValueError, match=r"FedSAM replaces the gradient of the step, but Manual optimizes manually"):
        federate(Manual(), toy_data(), [FedSAM()])
    with pytest.raises(
        ValueError, match=r"vectorized.*FedSAM\.on_train_batch_start works inside each client's own fit"
    ):
        federate(Toy("sgd"), toy_data(), [FedSAM()], engine="vectorized")
    with pytest.warns(UserWarning, match=r"ChangesGradients.on_after_backward changes gradients of its own"):
        federate(ChangesGradients("sgd"), toy_data([8]), [FedSAM()], max_rounds=1, sanity_check=True)


@pytest.mark.slow
def test_a_cut_run_goes_on_bit_for_bit(tmp_path):
    options = {"max_rounds": 3, "participation": 2}
    whole, _, again = cut_and_resumed(tmp_path, Toy("adam", dropout=0.2), toy_data(), lambda: [FedSAM()], **options)
    same(global_state(whole), global_state(again))


@pytest.mark.slow
def test_processes_give_the_same_bits():
    module, data = Toy("sgd", dropout=0.2), toy_data()
    runs = [federate(module, data, [FedSAM()], engine=engine) for engine in ("sequential", "processes")]
    same(*map(global_state, runs))


def test_several_processes_of_a_client_share_the_second_gradient():
    """Under DDP each process has batches of its own, and the mean of their gradients steps."""
    method = FedSAM()
    module = nn.Linear(1, 1)
    calls = []

    def reduce(value, reduce_op):
        calls.append(reduce_op)
        return value

    client = SimpleNamespace(scratch={"FedSAM": []}, loss_scale=1.0)
    method._client = client
    trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(reduce=reduce), accumulate_grad_batches=1)
    assert set(method._second_gradient(trainer, module, ["weight"])) == {"weight"} and calls == ["mean"]
