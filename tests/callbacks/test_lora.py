"""FedIT and FFA-LoRA: sheet B, entry 4.5."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedlightning
from fedlightning import FederatedCallback
from fedlightning.callbacks import FedAdam, FedIT, FedPer, FedProx, FedRep, FFALoRA, LGFedAvg
from fedlightning.layers import ordered_layers
from fedlightning.models import SmallTransformer
from fedlightning.seeding import isolated
from fedlightning.tensors import module_state
from fedlightning.wrappers import unmix
from tests.conformance.case import Case, Kept
from tests.helpers import (
    FEATURES,
    NormNet,
    PiecesStyle,
    Toy,
    differs,
    federate,
    global_state,
    mostly_slow,
    plain_fit,
    quadratic_data,
    same,
    spied,
    toy_data,
)

ADAPTERS = {"one_client": "it equals plain training of adapters, which is compared below"}
CASES = {
    "FedIT": Case(FedIT(), skip=ADAPTERS),
    "FedIT head": Case(FedIT(r=2, head=["head"]), skip=ADAPTERS, arguments={"full": True}),
    "FFALoRA": Case(FFALoRA(), skip=ADAPTERS),
}
KEPT = {"FFALoRA": Kept("FFALoRA"), "FedIT": Kept("FedIT")}

BOTH = pytest.mark.parametrize("algorithm", [FedIT, FFALoRA])
LAYERS = {"net.0": (8, FEATURES), "net.3": (3, 8)}


def wrapped(algorithm, module, seed=0):
    """What every owner builds."""
    with isolated(seed, "build"):
        return algorithm.wrap_module(copy.deepcopy(module), "server")


def base_of(state):
    """The frozen network's entries under their old names."""
    return {name.replace(".base_layer", ""): value for name, value in state.items() if ".lora_" not in name}


def delta(state, path, scale=1.0):
    """``scale B A`` in float64."""
    return scale * state[f"{path}.lora_B.default.weight"].double() @ state[f"{path}.lora_A.default.weight"].double()


class Net(Toy):
    """A toy around any network."""

    def __init__(self, net, **options):
        super().__init__(**options)
        self.net = net


class Tokens(nn.Module):
    """Six numbers as six tokens of a transformer."""

    def __init__(self):
        super().__init__()
        self.inner = SmallTransformer(vocab_size=9, num_classes=3, max_length=6, dim=8, num_heads=2, dropout=0.0)

    def forward(self, x):
        return self.inner(x.mul(2).long().clamp(0, 8))


class Encoder(nn.Module):
    """torch's own encoder with padding, which takes nested tensors on its fast path."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embed = nn.Linear(1, 8)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        padding = torch.zeros(x.shape, dtype=torch.bool)
        padding[: len(x) // 2, 4:] = True
        hidden = self.encoder(self.embed(x.unsqueeze(-1)), src_key_padding_mask=padding)
        return self.fc(hidden[:, :4].mean(1))


def vit():
    """A vision transformer of timm on 6 numbers blown up to pictures."""
    timm = pytest.importorskip("timm")
    net = timm.create_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2
    )
    return nn.Sequential(nn.Unflatten(1, (FEATURES, 1, 1)), Pictures(), net)


class Pictures(nn.Module):
    def forward(self, x):
        return x.mean(1, keepdim=True) + x[:, :3].expand(-1, 3, 8, 8)


NETWORKS = {"mlp": lambda: Toy().net, "tokens": Tokens, "encoder": Encoder, "vit": vit}


# -- the network as it begins ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("name", NETWORKS)
def test_fresh_adapters_change_nothing(algorithm, name):
    """(a), in train and eval mode."""
    torch.manual_seed(0)
    module, x = Net(NETWORKS[name]()), torch.randn(5, FEATURES)
    own = wrapped(algorithm(), module)
    for mode in (True, False):
        torch.testing.assert_close(own.train(mode)(x), module.train(mode)(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NETWORKS)
def test_adapters_act_the_same_in_every_mode(name):
    """torch's transformer layers have a fast path in eval mode that reads weights past the adapters."""
    torch.manual_seed(0)
    module, x = Net(NETWORKS[name]()), torch.randn(6, FEATURES)
    own = wrapped(FedIT(dropout=0.0, alpha=64), module)
    with torch.no_grad():
        for key, value in module_state(own).items():
            if ".lora_B." in key:
                value.normal_()
        before, fast, training = module.eval()(x), own.eval()(x), own.train()(x)
    slow = own.eval()(x)
    assert (slow - before).abs().max() > 1e-3
    torch.testing.assert_close(fast, slow.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(training, slow.detach(), atol=1e-5, rtol=1e-4)
    merged = unmix(own).eval()
    assert type(merged) is Net and module_state(merged).keys() == module_state(module).keys()
    with torch.no_grad():
        torch.testing.assert_close(merged(x), slow.detach(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", mostly_slow(["tokens", "encoder", "vit"], ["tokens"]))
def test_every_adapter_of_a_transformer_trains(name):
    module, data = Net(NETWORKS[name](), optimizer="adam", lr=0.01), toy_data()
    trainer, spy = spied(module, data, [FedIT(r=2)], max_rounds=2, local_epochs=1)
    start = module_state(wrapped(FedIT(r=2), module))
    for update in spy.of_round(0).values():
        factors = [key for key in update.state if ".lora_B." in key]
        assert len(factors) >= 5
        assert all(not torch.equal(update.state[key], start[key]) for key in factors)
    same(base_of(global_state(trainer)), module_state(module))


# -- what trains and travels -----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("make", [lambda: Toy("momentum"), lambda: NormNet("adamw")])
def test_the_network_stays_and_never_travels(algorithm, make):
    """(d): bit-equal at the server and at every client, in every round; bytes are the adapters'."""
    module, data = make(), toy_data()
    trainer, spy = spied(module, data, [algorithm(r=2)], max_rounds=3, participation=2)
    layers = {path: module.get_submodule(path).weight.shape for path in ("net.0", "net.3")}
    size = {path: 2 * (out + (into if algorithm is FedIT else 0)) for path, (out, into) in layers.items()}
    names = {
        f"{path}.lora_{factor}.default.weight" for path in layers for factor in ("AB" if algorithm is FedIT else "B")
    }
    for sent in [*spy.messages, *spy.updates]:
        assert set(sent.state) == names
        assert sent.num_bytes == 4 * sum(size.values())
    assert trainer.server.costs.bytes_up == trainer.server.costs.bytes_down == 3 * 2 * 4 * sum(size.values())
    for state in [*spy.rounds, *(module_state(trainer.module(client)) for client in data.client_ids)]:
        same(base_of(state), module_state(module))
    assert differs(spy.rounds[2], spy.rounds[1])


@BOTH
def test_the_first_factor(algorithm):
    """FFA-LoRA's ``A`` is bit-constant and one for all; FedIT's moves."""
    module, data = Toy("adam"), toy_data()
    trainer, spy = spied(module, data, [algorithm()], max_rounds=2)
    start = module_state(wrapped(algorithm(), module))
    key = "net.0.lora_A.default.weight"
    states = [spy.rounds[1], *(module_state(trainer.module(client)) for client in data.client_ids)]
    for state in states:
        assert torch.equal(state[key], start[key]) == (algorithm is FFALoRA)
    assert trainer.server.kinds[key] == ("trainable" if algorithm is FedIT else "frozen")


def test_the_head_trains_in_full_and_travels():
    module, data = NormNet("adamw"), toy_data()
    trainer, spy = spied(module, data, [FedIT(r=2, head=["net.1", "net.3"])], max_rounds=2)
    head = {name for name in module_state(module) if name.startswith(("net.1.", "net.3."))}
    adapters = {"net.0.lora_A.default.weight", "net.0.lora_B.default.weight"}
    assert set(spy.updates[0].state) == head | adapters
    start, end = module_state(module), global_state(trainer)
    assert all(differs({name: start[name]}, end) for name in head)  # statistics of a norm in the head move too
    assert torch.equal(end["net.0.base_layer.weight"], start["net.0.weight"])


def test_a_tied_head_trains_under_both_names():
    class Tied(Toy):
        def make(self, hidden, dropout):
            return nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)])

        def __init__(self):
            super().__init__()
            self.net[1].weight = self.net[0].weight

        def forward(self, x):
            return self.net[2](torch.tanh(self.net[1](torch.tanh(self.net[0](x)))))

    module = Tied()
    trainer, spy = spied(module, toy_data(), [FedIT(head=["net.1"])], max_rounds=1)
    assert {"net.0.weight", "net.1.weight", "net.1.bias"} < set(spy.updates[0].state)
    end = global_state(trainer)
    assert torch.equal(end["net.0.weight"], end["net.1.weight"])
    assert differs({"net.0.weight": module_state(module)["net.0.weight"]}, end)
    assert torch.equal(end["net.0.bias"], module_state(module)["net.0.bias"])


# -- arithmetic ------------------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """``W0 x + b + (alpha / r) B A x`` without peft."""

    def __init__(self, layer, a, scale, train_a):
        super().__init__()
        self.layer, self.scale = copy.deepcopy(layer).requires_grad_(False), scale
        self.a = nn.Parameter(a.clone(), requires_grad=train_a)
        self.b = nn.Parameter(torch.zeros(layer.out_features, len(a)))

    def forward(self, x):
        return self.layer(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


@BOTH
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_one_client_is_plain_training_of_adapters(algorithm, optimizer):
    """(c), against adapters written by hand and Lightning's own Trainer."""
    module, data = Toy(optimizer), toy_data([30])
    callback = algorithm(r=3, alpha=6, dropout=0.0)
    trained = global_state(federate(module, data, [callback], max_rounds=1, local_epochs=3))
    start, reference = module_state(wrapped(callback, module)), copy.deepcopy(module)
    for path in LAYERS:
        a = start[f"{path}.lora_A.default.weight"]
        own = ByHand(module.get_submodule(path), a, 6 / 3, algorithm is FedIT)
        reference.net[int(path[-1])] = own
    plain = plain_fit(reference, data, "0", epochs_per_round=3, max_epochs=3)
    for path in LAYERS:
        for factor in "AB":
            torch.testing.assert_close(
                trained[f"{path}.lora_{factor}.default.weight"], plain[f"{path}.{factor.lower()}"], atol=1e-6, rtol=1e-5
            )


@BOTH
def test_one_client_with_dropout_is_unbuiltning_s_fit_of_the_wrapped_module(algorithm):
    module, data = Toy("adam", dropout=0.3), toy_data([30])
    callback = algorithm(dropout=0.2)
    trained = global_state(federate(module, data, [callback], max_rounds=1, local_epochs=3))
    same(trained, plain_fit(wrapped(callback, module), data, "0", epochs_per_round=3, max_epochs=3))


@BOTH
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_each_factor_is_averaged_and_only_ffa_is_exact(algorithm, weighting):
    """(b): FFA-LoRA's mean change is the mean of the clients' changes; FedIT's is not."""
    module, data = Toy("sgd", lr=0.2), toy_data()
    trainer, spy = spied(module, data, [algorithm(r=4, alpha=4, weighting=weighting)], max_rounds=2, local_epochs=3)
    sizes = {"0": 24, "1": 40, "2": 16} if weighting == "samples" else dict.fromkeys("012", 1)
    end = global_state(trainer)
    frozen = module_state(wrapped(algorithm(r=4, alpha=4), module))
    for path in LAYERS:
        states = {client: frozen | update.state for client, update in spy.of_round(1).items()}
        total = sum(sizes.values())
        for factor in "AB":
            key = f"{path}.lora_{factor}.default.weight"
            mean = sum(state[key].double() * sizes[client] for client, state in states.items()) / total
            torch.testing.assert_close(end[key].double(), mean, atol=1e-7, rtol=1e-6)
        exact = sum(delta(state, path) * sizes[client] for client, state in states.items()) / total
        gap = (delta(end, path) - exact).abs().max() / exact.abs().max()
        assert gap < 1e-6 if algorithm is FFALoRA else gap > 1e-3


def test_fedit_is_exact_for_identical_clients():
    x, y = toy_data([20]).tensors["0"]["train"]
    splits = {"train": (x, y), "val": (x[:5], y[:5]), "test": (x[:5], y[:5])}
    data = type(toy_data())(dict.fromkeys("012", splits), shuffle=False)
    trainer, spy = spied(Toy("adam"), data, [FedIT(dropout=0.0)], max_rounds=2)
    first, *others = spy.of_round(1).values()
    for other in others:
        same(first.state, other.state)
    same(first.state, {name: global_state(trainer)[name] for name in first.state})


class Regression(Toy):
    """Least squares in float64, one linear layer without bias."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2, bias=False, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y[:, :2])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.3)


@BOTH
def test_one_full_batch_step_per_round_is_central_training_of_adapters(algorithm):
    """From one start the factors' mean steps are the pooled gradient's, whatever their product."""
    torch.manual_seed(3)
    x, y = (torch.randn(2, 24, 3, dtype=torch.float64) for _ in range(2))
    data = quadratic_data([[0.0] * 3] * 2, [[0.0] * 3] * 2, batch_size=24)
    for index in range(2):
        data.tensors[str(index)]["train"] = (x[index], y[index])
    module, callback = Regression(), algorithm(r=3, alpha=6, dropout=0.0)
    trained = global_state(federate(module, data, [callback], max_rounds=25, local_steps=1))
    w, pooled, target = module.net.weight.detach(), x.reshape(-1, 3), y.reshape(-1, 3)[:, :2]
    a = module_state(wrapped(callback, module))["net.lora_A.default.weight"]
    b = torch.zeros(2, 3, dtype=torch.float64)
    for _ in range(25):
        gradient = 2 * (pooled @ (w + 2 * b @ a).T - target).T @ pooled / target.numel()
        step_a = 2 * b.T @ gradient if algorithm is FedIT else 0.0
        b, a = b - 0.3 * 2 * gradient @ a.T, a - 0.3 * step_a
    assert b.abs().max() > 0.1
    torch.testing.assert_close(delta(trained, "net"), b @ a, atol=1e-10, rtol=0)


# -- other callbacks, optimizers, files ------------------------------------------------------------------------------


def test_corrections_and_server_optimizers_act_on_adapters_only():
    module, data = NormNet("momentum"), toy_data()
    plain = global_state(federate(module, data, [FedIT()], max_rounds=2))
    same(plain, global_state(federate(module, data, [FedIT(), FedProx(mu=0.0)], max_rounds=2)))
    assert differs(plain, global_state(federate(module, data, [FedIT(), FedProx(mu=1.0)], max_rounds=2)))
    adaptive = global_state(federate(module, data, [FedIT(), FedAdam()], max_rounds=2))
    assert differs(plain, adaptive)
    same(base_of(adaptive), module_state(module))


def test_adapters_of_a_private_head_stay_home():
    trainer, spy = spied(Toy(), toy_data(), [FedIT(), FedPer(personal=["net.3"])], max_rounds=2)
    assert {name.rpartition(".lora")[0] for name in spy.updates[0].state} == {"net.0"}
    assert trainer.server.global_module() is None
    heads = [module_state(trainer.module(client))["net.3.lora_B.default.weight"] for client in "01"]
    assert not torch.equal(*heads)


class Groups(PiecesStyle):
    """Two param groups that name their layers; ``listed`` of them."""

    def __init__(self, listed=2):
        super().__init__()
        self.listed = listed

    def configure_optimizers(self):
        groups = [{"params": [self.net["head"].weight]}, {"params": [self.net["body"].weight], "lr": 0.0}]
        return torch.optim.SGD(groups[: self.listed], 0.1)


def test_adapters_join_the_param_group_of_their_layer():
    _trainer, spy = spied(Groups(), toy_data(), [FedIT()], max_rounds=1)
    start = module_state(wrapped(FedIT(), Groups()))
    state = spy.updates[0].state
    assert torch.equal(state["net.body.lora_B.default.weight"], start["net.body.lora_B.default.weight"])
    assert differs({"b": state["net.head.lora_B.default.weight"]}, {"b": start["net.head.lora_B.default.weight"]})


def test_an_adapter_in_no_optimizer_is_an_error():
    with pytest.raises(Exception, match=r"net.body.lora_A.*no optimizer holds it"):
        federate(Groups(listed=1), toy_data(), [FedIT()], max_rounds=1)


@BOTH
def test_exports_open_again_and_merge_into_the_plain_module(algorithm, tmp_path):
    module, x = NormNet("adamw"), torch.randn(9, FEATURES)
    trainer = federate(module, toy_data(), [algorithm()], tmp_path, max_rounds=2, name="adapters")
    folder = trainer.run.path / "checkpoints"
    for file, owner in (("global.ckpt", None), ("clients/1.ckpt", "1")):
        opened = fedlightning.load(folder / file, trust=["tests"])
        same(module_state(opened), module_state(trainer.module(owner)))
        before = opened(x)
        plain = unmix(opened)
        assert type(plain) is NormNet
        again = NormNet("adamw")
        again.load_state_dict(plain.state_dict())
        torch.testing.assert_close(again.eval()(x), before, atol=1e-5, rtol=1e-4)
        assert differs(module_state(module), module_state(plain))


class Injected(FederatedCallback):
    """Puts a layer in without changing the class of the module."""

    def wrap_module(self, module, owner):
        module.net[3] = nn.Sequential(module.net[3], nn.Linear(3, 3))
        return module


@pytest.mark.parametrize("injected", [True, False])
def test_an_export_is_pickled_when_its_entries_are_not_the_class_s_own(injected, tmp_path):
    trainer = federate(Toy(), toy_data(), [Injected()] if injected else [], tmp_path, max_rounds=1, name="injected")
    path = trainer.run.path / "checkpoints/global.ckpt"
    same(module_state(fedlightning.load(path, trust=["tests"])), global_state(trainer))
    assert ("wrapped" in torch.load(path)["fedlightning"]) == injected
    if not injected:
        same(module_state(Toy.load_from_checkpoint(path)), global_state(trainer))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"r": 0}, r"r=0. Use a whole number in \[1, inf\)"),
        ({"r": 2.0}, r"r=2.0. Use a whole number in \[1, inf\)"),
        ({"alpha": 0}, r"alpha=0. Use a number in \(0, inf\)"),
        ({"dropout": 1.0}, r"dropout=1.0. Use a number in \[0, 1\)"),
    ],
)
def test_impossible_adapters_are_refused(bad, words):
    with pytest.raises(ValueError, match=f"FFALoRA got {words}"):
        FFALoRA(**bad)


def test_targets_are_paths_or_ends_of_paths():
    module = Net(vit())
    names = [name for name in module_state(wrapped(FedIT(target_modules=["qkv"]), module)) if ".lora_B." in name]
    assert [name.split(".lora")[0][-len("blocks.0.attn.qkv") :] for name in names] == [
        "blocks.0.attn.qkv",
        "blocks.1.attn.qkv",
    ]
    with pytest.raises(ValueError, match=r"'net.9' is not an nn.Linear layer of Toy .*(net.0|net.3)"):
        federate(Toy(), toy_data(), [FedIT(target_modules=["net.9"])])
    with pytest.raises(ValueError, match=r"'net.1' is not an nn.Linear"):
        federate(NormNet(), toy_data(), [FedIT(target_modules=["net.1"])])
    with pytest.raises(ValueError, match=r"'out_proj' of Net is inside nn.MultiheadAttention"):
        federate(Net(Encoder()), toy_data(), [FedIT(target_modules=["out_proj"])])
    with pytest.raises(ValueError, match=r"Net has no nn\.Linear layer outside the head"):
        federate(Net(nn.Linear(6, 3)), toy_data(), [FedIT(head=["net"])])


def test_without_peft_the_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install 'peft>="):
        federate(Toy(), toy_data(), [FedIT()])


@pytest.mark.parametrize(
    ("method", "shared"), [(FedPer(), ["net.0"]), (FedRep(), ["net.0"]), (LGFedAvg(num_layers=1), ["net.3"])], ids=str
)
def test_a_layer_with_adapters_is_one_layer(method, shared):
    trainer = federate(Toy(), toy_data(), [FedIT(r=2), method], max_rounds=1)
    names = [f"{path}.lora_{factor}.default.weight" for path in shared for factor in "AB"]
    assert list(trainer.server.shared_names()) == names
    layers = ordered_layers(trainer.server.module)
    assert [layer.name for layer in layers] == ["net.0", "net.3"] and len(layers[1].parameters) == 4


def test_one_factor_stays_with_the_clients_where_it_is_named():
    method = FedPer(personal=["net.0.lora_B", "net.3.lora_B"])
    trainer = federate(Toy(), toy_data(), [FedIT(r=2), method], max_rounds=1)
    assert [name.split(".")[-3] for name in trainer.server.shared_names()] == ["lora_A"] * 2
