"""Names in files: which classes and functions are looked up, and which only with the user's word."""

from __future__ import annotations

import os  # noqa: F401  imported, and still no class for a file to name
import subprocess  # noqa: F401
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.models import MLP
from fedlightning.run.names import UntrustedError, look_up, path_of, refuse_untrusted_names
from tests.helpers import Toy

HARMLESS = [
    MLP,
    Toy,
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
    assert look_up(path_of(thing)) is thing


HARMFUL = [
    "os:system", "posix:system", "subprocess:Popen", "builtins:eval", "builtins:exec", "importlib:import_module",
    "torch:load", "torch.hub:load", "torch.utils.data:DataLoader", "functools:partial", "shutil:rmtree",
    "fedlightning.cli:main", "fedlightning.run.files:os", "fedlightning.run.checkpoints:load",
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
