"""Names in files: which classes and functions are looked up, and which only with the user's word."""

from __future__ import annotations

import os  # noqa: F401  imported, and still no class for a file to name
import subprocess  # noqa: F401
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.eval_frame
from torch import nn
from torch.nn import functional as F

import fedlightning
from fedlightning.callbacks import FedAvg
from fedlightning.callbacks.diagnostics.layer_values import write_layers
from fedlightning.codec.allowed import UntrustedError, look_up, path_of, refuse_untrusted_names
from fedlightning.models import MLP, Classifier, TimmNet
from tests.helpers import Toy

HARMLESS = [
    nn.Linear,
    torch.optim.Adam,
    torch.optim.lr_scheduler.StepLR,
    F.relu,
    F.gelu,
    torch.relu,
    torch.tanh,
]


@pytest.mark.parametrize("thing", HARMLESS, ids=path_of)
def test_what_only_computes_is_taken(thing):
    assert look_up(path_of(thing), called=True) is thing


@pytest.mark.parametrize("cls", [MLP, Classifier, nn.Linear, nn.LSTM, nn.MultiheadAttention], ids=path_of)
def test_classes_that_are_restored_by_their_attributes_are_taken(cls):
    assert look_up(path_of(cls)) is cls


REFUSED = [
    Toy,
    torch.optim.Adam,
    nn.DataParallel,
    torch.fx.GraphModule,
    torch._dynamo.eval_frame.OptimizedModule,
    torch.jit.ScriptModule,
    nn.Container,
    FedAvg,
]


@pytest.mark.parametrize("cls", REFUSED, ids=path_of)
def test_other_classes_need_trust(cls):
    with pytest.raises(UntrustedError, match=r"names .*\. If you trust the file, say so with trust="):
        look_up(path_of(cls))
    assert look_up(path_of(cls), trust=[cls.__module__]) is cls


CALLED = [write_layers, MLP, TimmNet, Toy, fedlightning.load]


@pytest.mark.parametrize("thing", CALLED, ids=path_of)
def test_what_a_module_calls_is_pure(thing):
    with pytest.raises(UntrustedError):
        look_up(path_of(thing), called=True)


HARMFUL = [
    "os:system", "posix:system", "subprocess:Popen", "builtins:eval", "builtins:exec", "importlib:import_module",
    "torch:load", "torch.hub:load", "torch.utils.data:DataLoader", "functools:partial", "shutil:rmtree",
    "fedlightning.cli:main", "fedlightning.storage.files:os", "fedlightning.deployment.checkpoints:load",
    "fedlightning.models.recipes:inspect.os", "fedlightning.models.recipes:functools.partial",
    "torch.nn.modules.module:Module.forward.__globals__", "tests.helpers:copy.deepcopy", "antigravity:webbrowser",
]  # fmt: skip


@pytest.mark.parametrize("path", HARMFUL)
def test_what_may_do_more_needs_trust(path):
    with pytest.raises(UntrustedError, match=f"names {path.partition(':')[0]}"):
        look_up(path)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "path", ["", "os", ":x", "os:", "a b:c", "../x:y", None, 3, "os:a-b", "fedlightning.models:Nothing"]
)
def test_what_is_no_name_is_refused(path):
    with pytest.raises(ValueError):
        look_up(path)


@pytest.mark.parametrize("trust", [True, ["colorsys"], "colorsys", ["other", "colorsys"]])
def test_trust_is_enough(trust, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(UntrustedError, match=r"colorsys is not imported\. .* trust=\['colorsys'\]"):
        look_up("colorsys:rgb_to_hsv", ["color"])
    assert "colorsys" not in sys.modules
    assert look_up("colorsys:rgb_to_hsv", trust)(0, 0, 0) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"_instantiator": "lightning.pytorch.cli.instantiate_module", "net": {"class_path": "subprocess.Popen"}},
        {"_instantiator": "lightning.pytorch.cli.instantiate_module", "net": {"init_args": [{"act": "os.system"}]}},
        {"_instantiator": "lightning.pytorch.cli.instantiate_module", "net": "{class_path: antigravity.x}"},
        {"_class_path": "this.s"},
        {"_instantiator": "x", "net": '{"class_path": "torch\\u002ehub\\u002eload"}'},
        {"_instantiator": "x", "net": '"torch\\x2ehub\\x2eload"'},
        {"_instantiator": "x", "net": {"class_path": "GraphModule", "init_args": {}}},
        {"_instantiator": "x", "net.class_path": "GraphModule"},
        {"_instantiator": "x", "net": {"class_path": "fedlightning.models.TimmNet"}},
        {"_instantiator": "x", "net": {"class_path": "fedlightning.load"}},
        {"_instantiator": "x", "net": str(Path(__file__).parents[1] / "resume" / "planted.yaml")},
    ],
)
def test_hyper_parameters_that_lightning_would_call_are_looked_at(values):
    for entry in ("hyper_parameters", "hparams", "module_arguments"):
        with pytest.raises(UntrustedError):
            refuse_untrusted_names({entry: values}, False)
    assert "this" not in sys.modules


def test_texts_that_name_nothing_pass():
    texts = {"monitor": "net.loss", "file": "data/train.csv", "net": {"class_path": "fedlightning.models.MLP"},
             "optimizer": {"class_path": "torch.optim.SGD"}, "dotted": "1.5", "_instantiator": "x"}  # fmt: skip
    refuse_untrusted_names({"hyper_parameters": texts}, False)
    with pytest.raises(UntrustedError, match="type of their own"):
        refuse_untrusted_names({"hparams_type": print}, False)
