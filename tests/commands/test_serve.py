"""`serve`, `site` and `certificates` at the door; what they do over Flower is in tests/engines/flower."""

from __future__ import annotations

import sys

import pytest
import yaml

from fedlightning.cli import main
from fedlightning.commands.serve import Serve

CONFIG = "configs/quickstart.yaml"


def said(capsys, *words):
    assert main(words) == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def no_flower(monkeypatch, tmp_path):
    for name in ("flwr", "cryptography"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))  # put back as it was


@pytest.mark.parametrize(
    "words, reason",
    [
        (("serve", "--config", CONFIG, "--sites=2"), "has no ca.pem. Make certificates with"),
        (("serve", "--config", CONFIG, "--sites=0"), "sites=0 must be at least 1"),
        (("serve", "--config", CONFIG, "--sites=2", "--trainer.engine=processes"), "clients at sites train there"),
        (("serve", "--config", CONFIG, "--sites=2", "--insecure=true"), "pip install 'fedlightning[flower]'"),
        (("site", "--config", CONFIG, "--superlink=127.0.0.1:1", "--name=a"), "certificates/a has no ca.pem"),
        (
            ("site", "--config", CONFIG, "--superlink=x:1", "--name=a", "--insecure=true", "--clients=[z]"),
            "no client 'z'",
        ),
        (("site", "--config", CONFIG, "--superlink=127.0.0.1:1", "--name=a", "--insecure=true"), "pip install"),
        (("certificates", "--sites", "a"), "pip install 'fedlightning[flower]'"),
        (("certificates",), "--sites"),
        (("fit", "--config", CONFIG, "--trainer.engine=flower", "--trainer.name=x"), "fedlightning serve"),
    ],
    ids=["keys", "sites", "engine", "flower", "site keys", "client", "site flower", "certificates", "names", "fit"],
)
def test_what_cannot_start_is_said_in_a_sentence(tmp_path, capsys, words, reason):
    folder = [f"--folder={tmp_path / 'place'}"] if words[0] in ("serve", "site") else []
    root = [f"--trainer.default_root_dir={tmp_path}"] if words[0] in ("serve", "fit") else []
    error = said(capsys, *words, *folder, *root)
    assert reason in error and "Traceback" not in error


@pytest.mark.parametrize("name", ["PublicDataModule", "DigitsDataModule"])
def test_a_server_looks_at_public_data_only(tmp_path, name):
    inner = {"public": {"class_path": "fedlightning.datamodules.DigitsDataModule"}}
    section = {"class_path": f"fedlightning.datamodules.{name}", "init_args": inner | {"public_labels": False}}
    path = tmp_path / "data.yaml"
    path.write_text(yaml.safe_dump({"data": section}))
    cli = Serve("serve", ["--config", CONFIG, "--config", str(path), "--sites=2"])
    assert type(cli.datamodule).__name__ == (name if name == "PublicDataModule" else "NoneType")
