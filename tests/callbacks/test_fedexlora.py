"""FedEx-LoRA, RoLoRA and FedSA-LoRA against their formulas in numpy, and FlexLoRA beside them: sheet D, entries 13 to 17."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedlightning
from fedlightning.callbacks import (
    FedAdam,
    FedExLoRA,
    FedIT,
    FedPer,
    FedProx,
    FedSALoRA,
    FFALoRA,
    FlexLoRA,
    FLoRA,
    RoLoRA,
)
from fedlightning.models import GivenAdapters
from fedlightning.tensors import module_state
from tests.callbacks.test_flexlora import best
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Toy,
    ToyData,
    close,
    differs,
    federate,
    global_state,
    same,
    spied,
    toy_data,
)

SKIP = {"one_client": "it equals plain training of adapters, which is compared below"}
CASES = {
    "FedExLoRA": Case(FedExLoRA(r=3, residual_rank=None), skip=SKIP),
    "FedExLoRA head": Case(FedExLoRA(r=2, head=["head"], residual_rank=1), skip=SKIP, arguments={"full": True}),
    "RoLoRA": Case(RoLoRA(), skip=SKIP),
    "FedSALoRA": Case(FedSALoRA(r=2), skip=SKIP),
}
KEPT = {
    "FedExLoRA": Kept("FedExLoRA", server=("has", "stacks", "version"), client=("version",)),
    "RoLoRA": Kept("RoLoRA"),
    "FedSALoRA": Kept("FedSALoRA"),
}

EXACT = {"r": 2, "alpha": 2, "dropout": 0.0}
SHARES = [0.5, 0.3, 0.2]
A, B, W = "layer.lora_A.default.weight", "layer.lora_B.default.weight", "layer.base_layer.weight"


def numbers(counts, x=lambda client: float(client), width=1):
    """Clients with so many equal samples, which hold the client's number."""
    rows = [torch.full((count, width), x(client), dtype=torch.float64) for client, count in enumerate(counts)]
    splits = [{split: (row, row[:, 0].clone()) for split in ("train", "val", "test")} for row in rows]
    return ToyData({str(client): split for client, split in enumerate(splits)}, batch_size=100)


def drawn():
    draw = np.random.default_rng(0)
    b = [draw.standard_normal((6, 2)) for _ in range(3)]
    return b, [draw.standard_normal((2, 5)) for _ in range(3)]


def deployed(state, scale=1.0):
    return (state[W] + scale * state[B] @ state[A]).numpy()


def aggregated(method, rounds=1, **options):
    """One round in which the clients train to the drawn adapters, through the callback and real local steps."""
    return federate(GivenAdapters(SHARES, **options).double(), numbers([5, 3, 2]), [method], max_rounds=rounds)


# -- the exact table ---------------------------------------------------------------------------------------------------
def test_one_round_against_numpy():
    b, a = drawn()
    mean = sum(p * x @ y for p, x, y in zip(SHARES, b, a, strict=True))
    product = sum(p * x for p, x in zip(SHARES, b, strict=True)) @ sum(p * y for p, y in zip(SHARES, a, strict=True))
    expected = {
        FedIT(**EXACT): product,
        FLoRA(**EXACT): mean,
        FedExLoRA(**EXACT): mean,
        FlexLoRA(**EXACT): best(mean, 2),
        **{FedExLoRA(**EXACT, residual_rank=k): product + best(mean - product, k) for k in (1, 2, 3)},
    }
    errors = []
    for method, matrix in expected.items():
        state = global_state(aggregated(method))
        np.testing.assert_allclose(deployed(state), matrix, atol=1e-12, err_msg=repr(method))
        errors.append(np.linalg.norm(deployed(state) - mean))
    assert errors == pytest.approx([3.068946, 0.0, 0.0, 1.377956, 1.989320, 1.177566, 0.118725], abs=1e-6)
    assert errors[3] == pytest.approx(np.sqrt((np.linalg.svd(mean)[1][2:] ** 2).sum()), abs=1e-12)  # Eckart-Young


@pytest.mark.parametrize("kind", [FedExLoRA, FLoRA])
def test_a_residual_counts_with_the_scale_of_the_adapters(kind):
    """(a): W + s B A is s times the mean of products, for another s than 1."""
    b, a = drawn()
    mean = sum(p * x @ y for p, x, y in zip(SHARES, b, a, strict=True))
    state = global_state(aggregated(kind(r=2, alpha=3, dropout=0.0)))
    np.testing.assert_allclose(deployed(state, 1.5), 1.5 * mean, atol=1e-12)


@pytest.mark.parametrize("method", [FFALoRA(**EXACT), RoLoRA(**EXACT)])
def test_a_common_first_factor_is_exact(method):
    trainer = aggregated(method, common=True)
    state = global_state(trainer)
    mean = sum(p * x for p, x in zip(SHARES, drawn()[0], strict=True)) @ state[A].numpy()
    np.testing.assert_allclose(deployed(state), mean, atol=1e-12)


def test_a_common_second_factor_is_exact_too():
    """RoLoRA's second round: the clients' A beside the first round's mean B."""
    b, a = drawn()
    state = global_state(aggregated(RoLoRA(**EXACT), rounds=2, common=True))
    np.testing.assert_allclose(state[B], sum(p * x for p, x in zip(SHARES, b, strict=True)), atol=1e-12)
    np.testing.assert_allclose(state[A], sum(p * x for p, x in zip(SHARES, a, strict=True)), atol=1e-12)


# -- three rounds of real training (D17) -------------------------------------------------------------------------------
TARGETS = [np.array(t, float) for t in ([[2, 0], [0, 1], [1, 1]], [[0, 2], [1, 0], [-1, 1]], [[1, 1], [1, 1], [0, -1]])]
DISTANCES = {
    "FedIT": [0.870867, 0.417095, 0.317495],
    "FFALoRA": [1.033257, 0.747836, 0.652320],
    "RoLoRA": [1.033257, 0.815619, 0.487589],
    "FedExLoRA": [0.873023, 0.499345, 0.487126],
    "FlexLoRA": [0.864395, 0.366448, 0.290174],
}


class Targets(Toy):
    """Half the squared distance of the deployed layer from a client's target; adapters begin at (1, 0.5) and 0."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 3, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.net.weight)

    def training_step(self, batch, batch_idx):
        target = torch.tensor(TARGETS[int(batch[0][0, 0])])
        return (self.net(torch.eye(2, dtype=torch.float64)).T - target).square().sum() / 2

    def score(self, batch, split):
        self.log(f"{split}_loss", self.training_step(batch, 0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def starting(kind):
    class Starting(kind):
        """The method, from the first factor of the sheet."""

        def wrap_module(self, module, owner):
            module = super().wrap_module(module, owner)
            with torch.no_grad():
                module.net.lora_A["default"].weight.copy_(torch.tensor([[1.0, 0.5]]))
            return module

    return Starting(r=1, alpha=1, dropout=0.0)


@pytest.mark.parametrize("kind", [FedIT, FFALoRA, RoLoRA, FedExLoRA, FlexLoRA])
def test_three_rounds_of_training_against_the_sheet(kind):
    _, spy = spied(Targets(), numbers([1, 1, 1]), [starting(kind)], max_rounds=3, local_steps=5)
    mean, found = sum(TARGETS) / 3, []
    for state in spy.rounds:
        product = state["net.lora_B.default.weight"] @ state["net.lora_A.default.weight"]
        found.append(np.linalg.norm((state["net.base_layer.weight"] + product).numpy() - mean))
    assert found == pytest.approx(DISTANCES[kind.__name__], abs=1e-6)


# -- FedEx-LoRA --------------------------------------------------------------------------------------------------------
def test_fedex_of_one_client_is_fedit():
    """(b): no residual, and the network stays as it is."""
    options = {"r": 2, "alpha": 4, "dropout": 0.1}
    module = Toy()
    ends = [federate(module, toy_data([30]), [kind(**options)], max_rounds=2) for kind in (FedIT, FedExLoRA)]
    same(*map(global_state, ends))


@pytest.mark.parametrize("participation", [1.0, 2])
def test_clients_of_fedex_have_the_servers_network(participation):
    """Stacks of missed rounds, and whole weights, give the server's bits; with unequal weights."""
    module = Toy(lr=0.05, hidden=64)
    trainer, spy = spied(module, toy_data(), [FedExLoRA(r=1, dropout=0.0)], max_rounds=4, participation=participation)
    names = ["net.0.base_layer.weight", "net.3.base_layer.weight"]
    assert differs({names[1]: module_state(module)["net.3.weight"]}, global_state(trainer))
    for client in "012":
        state = module_state(trainer.module(client))
        same({name: state[name] for name in names}, {name: global_state(trainer)[name] for name in names})
    sent = [set(message.extras["FedExLoRA"]) for message in spy.messages if message.round == 1]
    assert all({"net.3.A", "net.3.B"} <= names for names in sent) or participation != 1.0


def test_the_residual_of_fedex_has_the_rank_of_all_clients_but_one():
    """(d), and what travels down is FLoRA's stack."""
    trainer = aggregated(FedExLoRA(**EXACT))
    assert np.linalg.matrix_rank(global_state(trainer)[W].numpy()) == 4


class Unlike(Toy):
    """Two layers whose residuals differ in rank: one has no input but a bias."""

    def __init__(self):
        super().__init__(hidden=64)
        self.still = nn.Linear(64, 64)

    def forward(self, x):
        hidden = self.net[1](self.net[0](x))
        return self.net[3](hidden + self.still(hidden * 0))


def test_a_cut_residual_has_one_size_in_all_layers():
    """Layers with and without a residual were stacks of several sizes, and messages tell one."""
    method = FedExLoRA(r=1, dropout=0.0, residual_rank=1, target_modules=["net.0", "still"])
    data = toy_data({"0": 16, "1": 16, "2": 16})
    trainer = federate(Unlike(), data, [method], max_rounds=4, participation=2, local_epochs=2)
    for client in "012":
        own, name = module_state(trainer.module(client)), "net.0.base_layer.weight"
        assert torch.equal(own[name], global_state(trainer)[name])
        assert torch.equal(own["still.base_layer.weight"], trainer.server.blueprint.base("")["still.base_layer.weight"])


# -- RoLoRA ------------------------------------------------------------------------------------------------------------
class AlwaysB(RoLoRA):
    """Invariant (a)."""

    def resting_factor(self, round):
        return "A"


@pytest.mark.parametrize("make", [lambda: Toy("momentum", dropout=0.3), lambda: NormNet("adamw")])
def test_rolora_that_always_trains_b_is_ffalora(make):
    options = {"r": 2, "target_modules": ["net.0"], "head": "net.3"}
    module = make()
    ends = [federate(module, toy_data(), [kind(**options)], max_rounds=3) for kind in (AlwaysB, FFALoRA)]
    same(*map(global_state, ends))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_one_factor_of_rolora_rests_bit_for_bit(optimizer):
    """(b) and (c); half of FedIT's bytes go up, both factors come down."""
    trainer, spy = spied(
        Toy(optimizer), toy_data(), [RoLoRA(r=2)], max_rounds=4, optimizer_state="keep", participation=2
    )
    states = [module_state(trainer.server.blueprint.build("server")), *spy.rounds]
    for number in range(4):
        moves, rests = ("lora_B", "lora_A") if number % 2 == 0 else ("lora_A", "lora_B")
        for name in (name for name in states[0] if ".lora_" in name):
            assert torch.equal(states[number][name], states[number + 1][name]) == (rests in name), (number, name)
        for update in spy.of_round(number).values():
            assert update.state and all(moves in name for name in update.state)
    assert all(sum(".lora_" in name for name in message.state) == 4 for message in spy.messages)
    assert trainer.server.costs.bytes_up * 2 < trainer.server.costs.bytes_down * 1.5


# -- FedSA-LoRA --------------------------------------------------------------------------------------------------------
def test_fedsa_shares_the_first_factors_only():
    module = Toy()
    trainer, spy = spied(
        module, toy_data(), [FedSALoRA(r=2, alpha=16, head="net.3", target_modules=["net.0"])], max_rounds=2
    )
    a = "net.0.lora_A.default.weight"
    assert all(set(one.state) == {a} for one in [*spy.updates, *spy.messages])
    mean = sum(
        update.state[a].double() * size for update, size in zip(spy.of_round(1).values(), (24, 40, 16), strict=True)
    )
    close({a: global_state(trainer)[a]}, {a: (mean / 80).float()})
    states = [module_state(trainer.module(client)) for client in "01"]
    for name in ("net.0.lora_B.default.weight", "net.3.weight"):
        assert not torch.equal(states[0][name], states[1][name])
    assert torch.equal(states[0][a], states[1][a]) and trainer.server.global_module() is None
    split = FedPer(personal=["net.0.lora_B", "net.3"])
    other = federate(
        module, toy_data(), [FedIT(r=2, alpha=16, head="net.3", target_modules=["net.0"]), split], max_rounds=2
    )
    same(states[0], module_state(other.module("0")))


# -- others ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [FedExLoRA(r=2), FlexLoRA(r=2), RoLoRA(r=2)], ids=lambda method: method.key)
def test_what_would_be_wrong_beside_them_is_refused(method):
    module = Toy()
    with pytest.raises(ValueError, match=f"{method.key} and FedAdam|FedAdam and {method.key}|{method.key}.*FedAdam"):
        federate(module, toy_data(), [method, FedAdam()], max_rounds=1)
    if not isinstance(method, RoLoRA):
        with pytest.raises(ValueError, match=f"{method.key}.*FedPer"):
            federate(module, toy_data(), [method, FedPer(personal=["net.3"])], max_rounds=1)
    plain = global_state(federate(module, toy_data(), [method], max_rounds=2))
    same(plain, global_state(federate(module, toy_data(), [method, FedProx(mu=0.0)], max_rounds=2)))
    assert differs(plain, global_state(federate(module, toy_data(), [method, FedProx(mu=1.0)], max_rounds=2)))


@pytest.mark.parametrize("method", [FedExLoRA(r=2), FlexLoRA(r=[2, 1])], ids=lambda method: method.key)
def test_exports_open_and_compute_what_is_deployed(method, tmp_path):
    trainer = federate(Toy(), toy_data(), [method], tmp_path, max_rounds=2, name="a")
    x = torch.randn(5, 6)
    for file, owner in (("global.ckpt", None), ("clients/1.ckpt", "1")):
        opened = fedlightning.load(trainer.run.path / "checkpoints" / file, trust=["tests"])
        assert torch.equal(opened(x), trainer.module(owner).eval()(x))
