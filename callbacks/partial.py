"""Partial sharing: FedPer, LG-FedAvg, FedBN and the siloed baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedlightning.algorithm import Facts, FederatedCallback, Newcomers, Server, Setup, WeightingName, requires
from fedlightning.callbacks.shared.server_models import no_model
from fedlightning.layers import as_names, expand, head_names, ordered_layers
from fedlightning.ranges import PositiveInt, at_most_one, make_init


class Body(requires.Requirement):
    """Something is left to share beside a head (its names: the callback's method `of`)."""

    usual = "Put fewer layers there, or use Local()."

    def fault(self, owner: Any, setup: Setup) -> str:
        layers = f"{type(setup.template).__name__} has {len(ordered_layers(setup.module))} layer(s), all in the head"
        whole = len(getattr(owner, self.of)(setup.module)) == len(setup.kinds)
        return f"leaves nothing to share: {layers}" if whole else ""


class KeepsSomething(requires.Requirement):
    """Of what a callback keeps with the clients, something would travel without it; else users are warned."""

    usual = "Remove it, or choose another part."
    advises = True

    def fault(self, owner: Any, setup: Setup) -> str:
        others = [other.key for other in setup.callbacks if other is not owner and other.claims("shared_names")]
        if not others or set(setup.shared_names(without=owner)) != set(setup.shared_names()):
            return ""
        return f"changes nothing beside {', '.join(others)}: what it keeps with the clients does not travel anyway"


@at_most_one("personal", "num_layers", why="it counts the layers where none are named. Use one of them.")
@make_init
class FedPer(FederatedCallback):
    """A shared body and a personal head.

    Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization layers", 2019.

    * Client: local training of the body ``u`` and its head ``v_i``, jointly.
    * Server: ``u = sum_i p_i u_i``.
    * Down: ``u``. Up: ``u_i``. State: ``v_i`` at each client.
    * Deployed: ``(u, v_i)``. There is no global model.

    Args:
        personal: Name or names of the personal entries or modules (``"head"``, ``["net.fc"]``). ``None`` (default): the
            last ``num_layers`` layers.
        num_layers: Number of personal layers, used where ``personal`` is ``None``. Default 1 (paper: K_P from 1).
        weighting: ``"samples"`` (default) or ``"uniform"``.

    Example:
        >>> from torch import nn
        >>> from fedlightning.callbacks import FedPer
        >>> FedPer().shared_names(None, nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1)))
        ['0.weight', '0.bias']
    """

    facts = Facts(requires=[Body(of="head_names"), KeepsSomething()], mixes_architectures=True)

    personal: str | list[str] | None = None
    num_layers: PositiveInt = 1
    weighting: WeightingName | None = None

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return the names of everything but the personal part."""
        return self.body_names(module)

    def head_names(self, module: nn.Module) -> list[str]:
        """Return the names of the personal part."""
        return part_names(module, self.personal, self.num_layers)

    def body_names(self, module: nn.Module) -> list[str]:
        """Return the names of the shared part."""
        return other_names(module, self.head_names(module))


class LGFedAvg(FederatedCallback):
    """A personal encoder under a shared head: FedPer the other way round.

    Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act globally: federated learning
    with local and global representations", 2020.

    * Client: local training of the shared top layers ``u`` and its encoder ``v_i`` (everything before), jointly.
    * Server: ``u = sum_i p_i u_i``.
    * Down: ``u``. Up: ``u_i``. State: ``v_i`` at each client, from the common ``v^0`` (the authors' code starts from a
      model that FedAvg trained, and selects on test data).
    * Deployed: ``(v_i, u)``. There is no global model; the paper's ensemble of encoders for new clients is not part of
      it.

    Args:
        shared: Name or names of the shared entries or modules (``"head"``). ``None`` (default): the last ``num_layers``
            layers.
        num_layers: Number of shared layers, used where ``shared`` is ``None``. Default 2 (authors: 2 to 3).
        weighting: ``"samples"`` (default), or ``"uniform"`` (the authors' code).

    Example:
        >>> from torch import nn
        >>> from fedlightning.callbacks import LGFedAvg
        >>> LGFedAvg(shared="2").shared_names(None, nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1)))
        ['2.weight', '2.bias']
    """

    facts = Facts(requires=[KeepsSomething()], mixes_architectures=True)

    @at_most_one("shared", "num_layers", why="it counts the layers where none are named. Use one of them.")
    def __init__(
        self, shared: str | list[str] | None = None, num_layers: PositiveInt = 2, weighting: WeightingName | None = None
    ) -> None:
        self.shared = shared
        self.num_layers = num_layers
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse names that are not there; warn where the split leaves one side empty.

        Raises:
            ValueError: If a name matches nothing, or there are fewer than ``num_layers`` layers.
        """
        count = len(part_names(setup.module, self.shared, self.num_layers))
        if count in (0, len(setup.kinds)):
            amount, other = ("nothing", "Local()") if count == 0 else ("everything", "FedAvg()")
            layers = ", ".join(layer.name for layer in ordered_layers(setup.module))
            setup.warn(
                f"LGFedAvg(shared={self.shared}, num_layers={self.num_layers}) shares {amount} of "
                f"{type(setup.template).__name__} ({layers}), which is {other}. Share the last layers only."
            )

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return the names of the top layers."""
        return part_names(module, self.shared, self.num_layers)


class FedBN(FederatedCallback):
    """FedAvg on everything except batch normalisation, which stays with each client.

    Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID features via local batch normalization", ICLR
    2021.

    * Client: local training of the whole model.
    * Server: the weighted mean of everything outside BatchNorm layers. LayerNorm and GroupNorm are shared.
    * Down and up: everything outside BatchNorm layers, which are found by module type.
    * State: affine parameters and running statistics of BatchNorm layers at each client.
    * Deployed: the client's model. There is no global model for unseen clients.

    Args:
        weighting: ``"samples"`` (default) or ``"uniform"`` (the authors' code).

    Example:
        >>> from types import SimpleNamespace
        >>> from torch import nn
        >>> from fedlightning.callbacks import FedBN
        >>> module = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        >>> FedBN().shared_names(SimpleNamespace(kinds=module.state_dict()), module)
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    facts = Facts(requires=[KeepsSomething()])

    def __init__(self, weighting: WeightingName | None = None) -> None:
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse a module without batch normalisation; warn where other callbacks keep it local already.

        Raises:
            ValueError: If the module has no BatchNorm layer.
        """
        if not batch_norm_names(setup.module):
            raise ValueError(
                f"FedBN keeps batch normalisation local, but {type(setup.template).__name__} has no BatchNorm layer. "
                "Remove FedBN, or use FedPer(personal=[...])."
            )

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return the names of everything outside BatchNorm layers."""
        return other_names(module, batch_norm_names(module))


class Local(FederatedCallback):
    """The siloed baseline: every client trains alone, and nothing travels.

    Called Silo in the FENDA-FL paper, CLT in FLIU, Local in PLayer-FL. Optimizers go on from round to round, so that R
    rounds of E epochs are one ordinary training of R*E epochs.

    Example:
        >>> from torch import nn
        >>> from fedlightning.callbacks import Local
        >>> Local().shared_names(None, nn.Linear(4, 2))
        []
    """

    facts = Facts(
        optimizer_state="keep",
        needs=no_model()[:1],
        mixes_architectures=True,
        newcomers=Newcomers(no_model="trains each client alone, and has no model for one that never trained"),
    )

    def check(self, setup: Setup) -> None:
        """Refuse callbacks that work on a model that travels, and those that only choose what does.

        Raises:
            ValueError: If there is one.
        """
        for other in setup.callbacks:
            if other is not self and other.claims("shared_names") and not other.claims("wrap_module"):
                raise ValueError(
                    f"Local lets no model travel, so {other.key} has nothing to choose from. Remove Local or {other.key}."
                )

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return nothing."""
        return []


def part_names(module: nn.Module, names: str | Sequence[str] | None, num_layers: int) -> list[str]:
    """Return the state names of a part of the module.

    Example:
        >>> module = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> part_names(module, None, num_layers=1), part_names(module, "0.bias", num_layers=1)
        (['2.weight', '2.bias'], ['0.bias'])
    """
    return head_names(module, num_layers) if names is None else expand(as_names(names), module.state_dict())


def other_names(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Return all state names that are not among ``names``."""
    part = set(names)
    return [name for name in module.state_dict() if name not in part]


def batch_norm_names(module: nn.Module) -> set[str]:
    """Return the state names inside BatchNorm layers (also SyncBatchNorm), by module type."""
    layers = [path for path, child in module.named_modules() if isinstance(child, _BatchNorm)]
    return {name for name in module.state_dict() if any(name.startswith(f"{path}.") for path in layers)}
