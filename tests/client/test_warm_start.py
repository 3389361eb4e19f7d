"""A federation that begins with the weights of a file."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer

from fedlightning.callbacks import FedPer
from fedlightning.errors import ConfigurationError
from fedlightning.tensors import module_state
from tests.helpers import NormNet, Toy, differs, federate, global_state, make_trainer, same, toy_data


def other(seed=5):
    torch.manual_seed(seed)
    return NormNet()


def of_lightning(tmp_path, module):
    trainer = Trainer(max_epochs=0, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "lightning.ckpt")
    return tmp_path / "lightning.ckpt"


def of_a_federation(tmp_path, module):
    trainer = federate(module, toy_data([8]), root=tmp_path / "earlier", max_rounds=1)
    module.load_state_dict(global_state(trainer))
    return trainer.run.path / "checkpoints" / "global.ckpt"


def of_torch(tmp_path, module):
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


@pytest.mark.parametrize("save", [of_lightning, of_a_federation, of_torch])
def test_it_is_as_if_the_module_had_been_given_with_these_weights(save, tmp_path):
    source, module = other(), NormNet()
    path, before = save(tmp_path, source), {n: v.clone() for n, v in module_state(module).items()}
    a = federate(module, toy_data(), init_from=str(path), max_rounds=2)
    b = federate(source, toy_data(), max_rounds=2)
    same(global_state(a), global_state(b))
    same(module_state(module), before)
    assert differs(global_state(a), global_state(federate(module, toy_data(), max_rounds=2)))


def test_private_layers_start_there_too_and_a_resumed_run_goes_on(tmp_path):
    source = other()
    path, data = of_torch(tmp_path, source), toy_data()
    whole = federate(NormNet(), data, [FedPer()], init_from=path, max_rounds=2, root=tmp_path / "a")
    same(module_state(whole.module("0")), module_state(federate(source, data, [FedPer()], max_rounds=2).module("0")))
    federate(NormNet(), data, [FedPer()], init_from=path, max_rounds=1, root=tmp_path / "b")
    again = make_trainer(tmp_path / "b", [FedPer()], init_from=path, max_rounds=2)
    again.fit(NormNet(), datamodule=data, resume="last", allow_config_change=True)
    same(module_state(whole.module("0")), module_state(again.module("0")))


class Thing:
    """An object that only code can make."""


WRONG = {
    "no file": (lambda: None, r"is not a file"),
    "other names": (
        lambda: {"weight": torch.zeros(1)},
        r"does not fit Toy: the file lacks 'net.0.weight'.*has besides 'weight'",
    ),
    "other shape": (
        lambda: Toy(hidden=4).state_dict(),
        r"'net.0.weight' has the shape \(4, 6\) in the file and \(8, 6\) in the module",
    ),
    "an object": (
        lambda: {"state_dict": Toy().state_dict(), "thing": Thing()},
        r"cannot be read as tensors.*could run code",
    ),
    "a part of a file": (lambda: 2, r"cannot be read as tensors"),
    "no bytes": (lambda: 1, r"cannot be read as tensors.*it is empty"),
    "no state": (lambda: {"loss": 1.0}, r"neither a Lightning checkpoint nor a state_dict"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_with_names(name, tmp_path):
    make, sentence = WRONG[name]
    content = make()
    if content is not None:
        torch.save(Toy().state_dict() if isinstance(content, int) else content, tmp_path / "file.pt")
    if isinstance(content, int):
        whole = (tmp_path / "file.pt").read_bytes()
        (tmp_path / "file.pt").write_bytes(whole[:-100] if content == 2 else b"")
    with pytest.raises(ConfigurationError, match=sentence):
        federate(Toy(), toy_data([8]), init_from=tmp_path / "file.pt")
