"""Short names of our classes, where another package that is loaded has the same."""

from __future__ import annotations

import json

import pytest
import torchvision.ops
from torch import nn

from fedlightning.commands.run import Commands
from fedlightning.config.short_forms import expand_file
from fedlightning.models import MLP

NET = {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [4], "num_classes": 10}}
MODEL = {"class_path": "Classifier", "init_args": {"net": NET, "num_classes": 10}}


@pytest.mark.parametrize("where", ["file", "words"])
def test_mlp_is_ours_beside_torchvisions(where, tmp_path):
    assert issubclass(torchvision.ops.MLP, nn.Module)  # loaded, of the same name
    (tmp_path / "run.yaml").write_text(json.dumps({"model": MODEL, "data": {"class_path": "DigitsDataModule"}}))
    words = {
        "file": ["--config", str(tmp_path / "run.yaml")],
        "words": ["--data=DigitsDataModule", f"--model={json.dumps(MODEL)}"],
    }
    assert type(Commands("fit", words[where]).model.net) is MLP


def test_other_names_and_texts_stay():
    document = {"model": {"class_path": "my.MLP", "init_args": {"kind": "MLP", "nets": [{"class_path": "Mine"}]}}}
    assert expand_file(document) == document
