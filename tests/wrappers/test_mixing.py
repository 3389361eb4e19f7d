from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from fedlightning.wrappers import (
    AddedParametersMixin,
    Mixin,
    adopt_parameters,
    dual_by_head,
    mix,
    mix_logits,
    mixins_of,
    unmix,
    user_class,
)
from tests.wrappers.modules import Base, ThroughForward, ThroughNet, ThroughParameters, batch_for, fit


class LouderMixin(Mixin):
    wraps = ("training_step", "test_step")
    factor: float

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.factor * call(*args, **kwargs)


class ShiftedMixin(LouderMixin):
    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(*args, **kwargs) + 1


class ExtraMixin(AddedParametersMixin):
    def added_parameters(self) -> dict[str, str]:
        return {**super().added_parameters(), "extra": "net.fc.weight"}


def louder(module: Base, factor: float = 2.0) -> Base:
    mix(module, LouderMixin).factor = factor  # type: ignore[assignment]
    return module


def test_one_class_object_and_the_users_type() -> None:
    first, second = louder(ThroughNet()), louder(ThroughNet())
    assert type(first) is type(second) and isinstance(first, ThroughNet)
    assert type(first).__name__ == "Louder_ThroughNet" and type(first).__name__.isidentifier()
    assert mix(first, LouderMixin) is first and mixins_of(first) == (LouderMixin,)
    assert user_class(first) is ThroughNet and mixins_of(ThroughNet()) == ()
    assert type(unmix(first)) is ThroughNet and type(unmix(first)) is ThroughNet


def test_mixins_stack_with_the_last_one_outermost() -> None:
    module = ThroughNet().eval()
    plain = module.training_step(batch_for(module), 0)
    mix(louder(module), ShiftedMixin)
    assert mixins_of(module) == (ShiftedMixin, LouderMixin)
    assert torch.equal(module.training_step(batch_for(module), 0), 2 * plain + 1)
    assert torch.equal(unmix(module).training_step(batch_for(module), 0), plain)


def test_lightning_sees_the_users_signatures_and_missing_steps() -> None:
    module = mix(louder(ThroughParameters()), ShiftedMixin)  # its training_step takes no batch_idx
    assert is_overridden("training_step", module) and not is_overridden("test_step", module)
    fit(module, 1)


def test_a_method_on_the_instance_is_refused() -> None:
    module = ThroughNet()
    vars(module)["training_step"] = module.training_step
    with pytest.raises(TypeError, match="set on the instance"):
        louder(module)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy])
def test_copies_keep_class_and_state(how: Callable[[Any], Any]) -> None:
    module = mix(louder(ThroughNet(), 3.0), ShiftedMixin).eval()
    other = how(module)
    assert type(other) is type(module) and other.factor == 3.0 and other.hparams == module.hparams
    assert torch.equal(other.training_step(batch_for(module), 0), module.training_step(batch_for(module), 0))


def test_every_pickle_protocol() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert type(pickle.loads(pickle.dumps(louder(ThroughNet()), protocol))).__name__ == "Louder_ThroughNet"


def test_local_classes_copy_but_do_not_pickle() -> None:
    class Local(ThroughNet):
        pass

    module = louder(Local())
    assert type(copy.deepcopy(module)) is type(module)
    with pytest.raises((pickle.PicklingError, AttributeError), match="Local"):
        pickle.dumps(module)


@pytest.mark.slow
def test_wrapped_modules_open_in_a_fresh_process(tmp_path: Path) -> None:
    modules: list[Any] = [
        dual_by_head(ThroughForward(), "net.fc").eval(),
        mix_logits(dual_by_head(ThroughForward(), "net.fc", order="local_first"), ThroughForward(), 0.25).eval(),
        mix(louder(ThroughForward()), ShiftedMixin).eval(),
    ]
    x = batch_for(modules[0])[0]
    with (tmp_path / "modules.pkl").open("wb") as file:
        pickle.dump((modules, x, [module(x) for module in modules]), file)
    code = (
        "import fedlightning, pickle, sys, torch; torch.set_num_threads(1)\n"
        "modules, x, expected = pickle.load(open(sys.argv[1], 'rb'))\n"
        "for module, output in zip(modules, expected): torch.testing.assert_close(module(x), output)\n"
        "print(*(type(module).__name__ for module in modules))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "modules.pkl")],
        cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-3:] == [type(module).__name__ for module in modules]


def test_checkpoints_of_unmixed_modules_open_with_the_users_class(tmp_path: Path) -> None:
    module = mix_logits(louder(ThroughForward(lr=0.02)), ThroughForward())  # type: ignore[assignment]
    fit(module, 1)
    unmix(module)
    assert not [name for name in module.state_dict() if "personal" in name]
    trainer = fit(module, 1)
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    again = ThroughForward.load_from_checkpoint(tmp_path / "m.ckpt", weights_only=False)
    assert again.hparams["lr"] == 0.02
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), module.state_dict().values(), strict=True)
    )


def with_extra(optim: str) -> Base:
    module = mix(ThroughForward(optim=optim), ExtraMixin)
    module.extra = nn.Parameter(torch.zeros(2))
    return module


def groups_of(configured: Any) -> list[dict[str, Any]]:
    while not hasattr(configured, "param_groups"):
        configured = configured["optimizer"] if isinstance(configured, dict) else configured[0]
    return list(configured.param_groups)


@pytest.mark.parametrize("optim", ["all", "list", "groups", "pair", "dict", "dicts", "named"])
def test_added_parameters_join_the_group_of_their_original(optim: str) -> None:
    module = with_extra(optim)
    if optim == "list":  # a bare list of optimizers whose body_parameters() swallow the extra one
        module.body_parameters = lambda: list(module.net.conv.parameters())  # type: ignore[method-assign]
    configured = module.configure_optimizers()
    groups = groups_of(configured)
    holding = [group for group in groups if any(p is module.extra for p in group["params"])]
    assert len(holding) == 1 and sum(p is module.extra for p in holding[0]["params"]) == 1
    if optim == "list":
        assert any(p is module.net.fc.weight for p in holding[0]["params"])
    if "param_names" in holding[0]:
        assert len(holding[0]["param_names"]) == len(holding[0]["params"])
    assert adopt_parameters(module, configured, module.added_parameters()) is configured


def test_no_optimizer_is_accepted_and_a_lost_parameter_is_not() -> None:
    assert with_extra("none").configure_optimizers() is None
    module = with_extra("all")
    optimizer = torch.optim.SGD(module.net.conv.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"`extra` was added to ThroughForward.*`net.fc.weight` is in no param group"):
        adopt_parameters(module, [optimizer], {"extra": "net.fc.weight"})
    module.extra.requires_grad_(False)
    adopt_parameters(module, [optimizer], {"extra": "net.fc.weight"})
    assert len(optimizer.param_groups) == 1 and len(optimizer.param_groups[0]["params"]) == 1
