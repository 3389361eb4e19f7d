"""A file that attacks: whatever it names, `fedlightning.load` opens, writes, starts, connects to and imports nothing."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

import fedlightning
from fedlightning.codec.allowed import HOOKS, UntrustedError, forbidden, path_of
from fedlightning.codec.modules import from_tree
from fedlightning.deployment.checkpoints import Exporter
from fedlightning.models import MLP, Classifier, TimmNet
from fedlightning.storage.files import UnreadableError
from fedlightning.tensors import equal, module_state
from tests.helpers import Toy, mostly_slow
from tests.resume import gadgets
from tests.resume.gadgets import (
    Maker,
    evil,
    forged,
    name_of,
    names_in,
    object_of,
    own_state,
    partial_of,
    pools,
    watched,
)


@pytest.fixture
def maker(tmp_path):
    return Maker(tmp_path)


def test_the_watch_sees_what_a_gadget_does(tmp_path):
    victim = tmp_path / "victim"
    tree = partial_of(gadgets.WRITER, victim, "evil")
    with watched() as done:
        from_tree(forged(tree), trust=True)()
    assert victim.exists()
    assert any(line.startswith("open") and "victim" in line for line in done)


@pytest.mark.parametrize("kind", evil(Path()))
@pytest.mark.parametrize("place", ["net", "activation", "make_optimizer"])
def test_what_attacks_is_refused(maker, kind, place):
    value = evil(maker.victim)[kind]
    layer = object_of("torch.nn.modules.transformer:TransformerEncoderLayer", own_state() | {"activation": value})
    net = {"net": value, "activation": layer}.get(place, object_of("torch.nn.modules.linear:Identity", own_state()))
    path = maker.write(net, **({place: value} if place == "make_optimizer" else {}))
    with (
        watched(path) as done,
        pytest.raises((UntrustedError, UnreadableError), match=r"gadget\.ckpt is (not opened|no)"),
    ):
        fedlightning.load(path)
    assert done == []
    assert not maker.victim.exists()


@pytest.mark.parametrize("hooks", sorted(HOOKS))
def test_hooks_are_refused(maker, hooks):
    net = object_of("torch.nn.modules.linear:Identity", own_state() | {hooks: {0: name_of("torch.nn.functional:relu")}})
    with pytest.raises(UnreadableError, match=rf"a Identity in it has something in {hooks}, which has to be empty"):
        fedlightning.load(maker.write(net))


@pytest.mark.parametrize(
    "state", [3, [], {"_modules": 3}, {"_modules": {"a": 1}}, {"_parameters": {"a": "b"}}, {"__class__": 1}, {1: 2}]
)
def test_attributes_that_are_none_are_refused(maker, state):
    with pytest.raises(UnreadableError):
        fedlightning.load(maker.write(object_of("torch.nn.modules.linear:Identity", state)))


def test_a_module_that_holds_itself_is_refused(maker):
    state = own_state()
    net = object_of("torch.nn.modules.container:Sequential", state)
    state["_modules"] = {"0": net}
    with pytest.raises(UnreadableError, match="not a whole module"):
        fedlightning.load(maker.write(net))


def test_no_name_in_a_file_becomes_code(maker, monkeypatch):
    pytest.importorskip("timm")
    monkeypatch.chdir(maker.victim.parent)
    layer = 'x[")\rgetattr(__import__("os"),"mkdir")("victim")\rdef f(): #]'
    relu = object_of("torch.nn.modules.activation:ReLU", own_state() | {"inplace": False})
    traced = object_of("torch.nn.modules.container:Sequential", own_state() | {"_modules": {layer: relu}})
    activation = partial_of("timm.models._features_fx:GraphExtractNet", traced, ["input"])
    encoder = vars(nn.TransformerEncoderLayer(4, 1, 4, batch_first=True)) | {"activation": activation}
    path = maker.write(object_of(path_of(nn.TransformerEncoderLayer), encoder))
    with pytest.raises(UntrustedError, match="GraphExtractNet, which may do more than compute"):
        fedlightning.load(path)(torch.zeros(2, 3, 4))
    assert not maker.victim.exists()


@pytest.mark.parametrize("name", ["", "a.b", "__deepcopy__", "__torch_function__", 'x")', "x\ry", "x\u2028y", "x\\"])
@pytest.mark.parametrize("held", ["_modules", "_parameters", "_buffers"])
def test_entries_with_names_that_mean_something_are_refused(maker, held, name):
    inner = object_of("torch.nn.modules.linear:Identity", own_state())
    value = inner if held == "_modules" else nn.Parameter(torch.zeros(1))
    net = object_of("torch.nn.modules.linear:Identity", own_state() | {held: {name: value}})
    with pytest.raises(UnreadableError, match=rf"an entry of {held} with the name"):
        fedlightning.load(maker.write(net))


@pytest.mark.parametrize("held", ["_forward_hooks", "_modules"])
def test_what_is_filled_after_it_was_looked_at_is_refused(maker, held):
    later: dict[str, object] = {}
    inner = object_of("torch.nn.modules.linear:Identity", own_state() | {held: later})
    later |= {"inner": inner, "function": name_of("torch.nn.functional:relu")}
    net = object_of("torch.nn.modules.linear:Identity", {"odd": later} | own_state())
    with pytest.raises(UnreadableError, match=f"a Identity in it has .*{held}"):
        fedlightning.load(maker.write(net))


def test_names_of_clients_are_names_of_layers(tmp_path):
    check_opens(tmp_path, nn.ModuleDict({"chest x-ray (Ü)": nn.Linear(2, 2), "1": nn.ReLU()}))


SAMPLE = [
    nn.Linear,
    nn.LSTM,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.Conv2d,
    nn.Upsample,
    Classifier,
    MLP,
    TimmNet,
]


@pytest.mark.parametrize("cls", SAMPLE, ids=lambda cls: cls.__name__)
def test_attributes_lead_nowhere(maker, cls):
    for value in pools(maker.victim).values():
        _, done = maker.tried(object_of(path_of(cls), own_state() | dict.fromkeys(names_in(cls), value)))
        assert done == []


def test_classes_that_are_imported_are_on_the_list_or_refused():
    allowed = [cls for cls in gadgets.modules() if forbidden(cls) is None]
    assert {cls.__module__.partition(".")[0] for cls in allowed} <= set(gadgets.PACKAGES)
    assert {LightningModule, nn.DataParallel, Toy}.isdisjoint(allowed)


def small(net: nn.Module) -> Classifier:
    return Classifier(net, num_classes=2, optimizer=functools.partial(torch.optim.SGD, lr=0.1))


def test_models_of_torch_and_ours_open_without_trust(tmp_path):
    nets = [
        MLP(4, [3], 2),
        nn.Sequential(nn.LSTM(4, 2), nn.MultiheadAttention(2, 1), nn.TransformerEncoderLayer(4, 2)),
        nn.Linear(2, 2),
    ]
    for net in nets:
        check_opens(tmp_path, net)


@pytest.mark.parametrize(
    "name", mostly_slow(["mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "swin_t"], ["resnet18"])
)
def test_models_of_torchvision_open_without_trust(tmp_path, name):
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        net = models.get_model(name, weights=None)
    check_opens(tmp_path, net.to_empty(device="cpu"))


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["resnet10t", "vit_tiny_patch16_224", "mobilenetv3_small_050", "convnext_atto"], ["vit_tiny_patch16_224"]
    ),
)
def test_models_of_timm_open_without_trust(tmp_path, name):
    pytest.importorskip("timm")
    check_opens(tmp_path, TimmNet(name, num_classes=2))


def test_low_rank_layers_of_peft_open_without_trust(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["fc1"])
    check_opens(tmp_path, peft.get_peft_model(MLP(4, [3], 2), config))
    check_opens(tmp_path, peft.inject_adapter_in_model(config, MLP(4, [3], 2)))


def check_opens(tmp_path, net):
    for name, value in module_state(net).items():  # no NaN from memory that nobody has written
        value.fill_(0.5 if "num_batches" not in name else 1)
    module = small(net)
    path = tmp_path / "model.ckpt"
    Exporter(lambda architecture: module).save(path, module, {})
    opened = fedlightning.load(path)
    assert equal(module_state(opened), module_state(module))
    assert repr(opened.net) == repr(net.eval())
    assert opened.make_optimizer.func is torch.optim.SGD


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_gadget_of_anything_does_anything(tmp_path, part):
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.resume.gadgets", str(tmp_path), str(part), "4"],
        capture_output=True, text=True, timeout=1200, check=True,
    )  # fmt: skip
    counts, *done = [line for line in ran.stdout.splitlines() if " files, " in line or ": " in line]
    assert int(counts.split()[0]) > 1000
    assert done == []
