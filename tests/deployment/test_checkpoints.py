"""What a finished run leaves to use: one file for the server, one for every client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedlightning

# isort: split
from lightning.pytorch import Trainer

from fedlightning.callbacks import FENDA, FedAvg, FedPer
from fedlightning.deployment.checkpoints import Exporter, link
from fedlightning.storage.files import UnreadableError
from fedlightning.tensors import equal, module_state
from tests.helpers import Toy, federate, global_state, toy_data

CLIENTS = ["0", "1", "2"]


def test_clients_of_the_global_model_share_its_file(tmp_path: Path) -> None:
    trainer = federate(Toy(), toy_data(), [FedAvg()], tmp_path)
    folder = next(tmp_path.rglob("checkpoints"))
    whole = folder / "global.ckpt"
    files = sorted((folder / "clients").iterdir())
    assert [file.stem for file in files] == CLIENTS
    assert all(file.samefile(whole) for file in files)
    opened = fedlightning.load(files[0], Toy())
    assert equal(module_state(opened), global_state(trainer))


def test_clients_with_a_part_of_their_own_have_files_of_their_own(tmp_path: Path) -> None:
    trainer = federate(Toy(), toy_data(), [FedPer()], tmp_path)
    files = sorted((next(tmp_path.rglob("checkpoints")) / "clients").iterdir())
    assert len({file.stat().st_ino for file in files}) == len(files) == len(CLIENTS)
    for file, client in zip(files, CLIENTS, strict=True):
        own = torch.load(file, weights_only=False)
        assert own["fedlightning"]["client"] == client
        assert equal(own["state_dict"], module_state(trainer.client(client).module))


class Bare(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Identity()


class BuiltLater(Bare):
    def configure_model(self) -> None:
        if isinstance(self.net, torch.nn.Identity):
            self.net = self.make(8, 0.0)


def test_load_from_checkpoint_names_the_way_to_open_a_wrapped_module(tmp_path: Path) -> None:
    federate(Toy(), toy_data(), [FENDA(head="net.3")], tmp_path)
    file = next(tmp_path.rglob("clients/*.ckpt"))
    with pytest.raises(RuntimeError, match=r"open it with fedlightning\.load"):
        Toy.load_from_checkpoint(file)
    assert "net.3.weight" in module_state(fedlightning.load(file, trust=["tests"]))


def test_a_module_to_load_into_builds_its_layers_and_takes_every_weight(tmp_path: Path) -> None:
    trainer = federate(Toy(), toy_data(), [FedAvg()], tmp_path)
    file = next(tmp_path.rglob("global.ckpt"))
    assert equal(module_state(fedlightning.load(file, BuiltLater())), global_state(trainer))
    with pytest.raises(UnreadableError, match=r"'net\.0\.weight', which Bare does not have"):
        fedlightning.load(file, Bare())


class Counts(Toy):
    """Has a state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Trims(Toy):
    """Leaves what is frozen out of its files, and brings a note along."""

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self.note = ""
        self.net[0].requires_grad_(False)
        self.strict_loading = strict

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = {name: value for name, value in checkpoint["state_dict"].items() if not name.startswith("net.0")}
        checkpoint.update(state_dict=kept, note="trained")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


class AsksItsTrainer(BuiltLater):
    def configure_model(self) -> None:
        assert self.trainer.world_size == 1
        super().configure_model()


def test_an_export_is_known_to_load_whatever_the_module_adds_or_leaves_out(tmp_path: Path) -> None:
    module = Counts()
    module.count = 7
    federate(module, toy_data(), [FedAvg()], tmp_path / "counts")
    opened = fedlightning.load(next((tmp_path / "counts").rglob("global.ckpt")), Counts())
    assert opened.count == 7
    trainer = federate(Trims(), toy_data(), [FedAvg()], tmp_path / "trims")
    file = next((tmp_path / "trims").rglob("global.ckpt"))
    opened = fedlightning.load(file, Trims())
    assert opened.note == "trained"
    assert torch.equal(opened.net[3].weight, global_state(trainer)["net.3.weight"])
    with pytest.raises(
        UnreadableError, match=r"'net\.0\.weight' of Trims.* is missing in it \(.*strict_loading = False\)"
    ):
        fedlightning.load(file, Trims(strict=True))
    trainer = federate(AsksItsTrainer(), toy_data(), [FedAvg()], tmp_path / "late")
    opened = fedlightning.load(next((tmp_path / "late").rglob("global.ckpt")), AsksItsTrainer())
    assert equal(module_state(opened), global_state(trainer)) and opened._trainer is None


def test_a_link_replaces_what_was_there_and_works_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same, path = tmp_path / "same", tmp_path / "path"
    same.write_text("new")
    path.write_text("old")
    link(path, same)
    assert path.samefile(same)

    def refuse(*args: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    path.unlink()
    link(path, same)
    assert path.read_text() == "new"
    assert not path.samefile(same)


def test_what_an_interrupted_link_left_is_not_written_through(tmp_path: Path) -> None:
    whole, client = tmp_path / "global.ckpt", tmp_path / "client.ckpt"
    exporter = Exporter(lambda architecture: Toy())
    exporter.save(whole, Toy(), {})
    before = whole.read_bytes()
    (tmp_path / "client.ckpt.tmp").hardlink_to(whole)
    exporter.save(client, Toy(), {"client": "0"})
    assert whole.read_bytes() == before
    assert not client.samefile(whole)


def test_an_exported_checkpoint_goes_on_in_plain_lightning(tmp_path: Path) -> None:
    federate(Toy(), toy_data(), [FedAvg()], tmp_path)
    file, data = next(tmp_path.rglob("checkpoints/global.ckpt")), toy_data()
    data.setup()
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    loaders = {split: data.client_dataloader("0", split) for split in ("train", "test")}
    exported = torch.load(file, weights_only=True)["state_dict"]
    tested = Toy()
    Trainer(**options).test(tested, loaders["test"], ckpt_path=file, verbose=False, weights_only=True)
    assert equal(module_state(tested), exported)
    with pytest.raises(KeyError, match="contains only the model"):  # optimizers are the clients' own
        Trainer(**options).fit(Toy(), loaders["train"], ckpt_path=file, weights_only=True)
    opened = fedlightning.load(file, Toy())
    assert equal(module_state(opened), exported)
    trainer = Trainer(**options)
    trainer.fit(opened, loaders["train"])
    assert trainer.global_step > 0 and not equal(module_state(opened), exported)
