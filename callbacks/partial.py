"""Partial sharing: FedPer, LG-FedAvg, FedBN and the siloed baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedlightning.algorithm import FederatedCallback, Server, Setup, WeightingName, expand, head_names, ordered_layers


class FedPer(FederatedCallback):
    """A shared body and a personal head.

    Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization layers", 2019.

    Up and down: the body ``u``. The head ``v_i`` stays with its client; both are trained jointly. There is no global
    model. Server: ``u = sum_i p_i u_i``.

    Args:
        personal: names or module prefixes of the personal part (``["head"]``, ``["net.fc"]``); or
        num_layers: the last K layers are personal (paper: K_P from 1); used when ``personal`` is ``None``.
        weighting: ``"samples"`` or ``"uniform"``.
    """

    def __init__(
        self, personal: list[str] | None = None, num_layers: int = 1, weighting: WeightingName | None = None
    ) -> None:
        self.personal = personal
        self.num_layers = num_layers
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse names that are not there, and a split with nothing shared."""
        refuse_no_body(self, setup, part_names(setup.module, self.personal, self.num_layers))

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Everything but the personal part."""
        return other_names(module, part_names(module, self.personal, self.num_layers))


class LGFedAvg(FederatedCallback):
    """A personal encoder under a shared head: FedPer the other way round.

    Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act globally: federated learning
    with local and global representations", 2020.

    Up and down: the top layers ``u``. The encoder ``v_i`` (everything before) stays with its client; both are trained
    jointly. There is no global model; the paper's ensemble of encoders for new clients is not part of it. Server: ``u =
    sum_i p_i u_i``. Every client starts at the common ``v^0`` (the authors' code starts from a model that FedAvg
    trained, and selects on test data).

    Args:
        shared: names or module prefixes of the shared part (``["head"]``); or
        num_layers: the last K layers are shared (authors: 2 to 3); used when ``shared`` is ``None``.
        weighting: ``"samples"``, or ``"uniform"`` (the authors' code).
    """

    def __init__(
        self, shared: list[str] | None = None, num_layers: int = 2, weighting: WeightingName | None = None
    ) -> None:
        self.shared = shared
        self.num_layers = num_layers
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse names that are not there; say so where the split leaves one side empty."""
        count = len(part_names(setup.module, self.shared, self.num_layers))
        if count in (0, len(setup.kinds)):
            one, other = ("nothing", "Local()") if count == 0 else ("everything", "FedAvg()")
            layers = ", ".join(layer.name for layer in ordered_layers(setup.module))
            setup.warn(
                f"LGFedAvg(shared={self.shared}, num_layers={self.num_layers}) shares {one} of "
                f"{type(setup.template).__name__} ({layers}), which is {other}. Share the last layers only."
            )

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """The top layers."""
        return part_names(module, self.shared, self.num_layers)


class FedBN(FederatedCallback):
    """FedAvg on everything except batch normalisation.

    Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID features via local batch normalization", ICLR
    2021.

    All state of BatchNorm layers (affine parameters and running statistics, found by module type) stays with each
    client; LayerNorm and GroupNorm are shared. There is no global model for unseen clients.

    Args:
        weighting: ``"samples"`` or ``"uniform"`` (the authors' code).
    """

    def __init__(self, weighting: WeightingName | None = None) -> None:
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse a module without batch normalisation."""
        if not batch_norm_names(setup.module):
            raise ValueError(
                f"FedBN keeps batch normalisation local, but {type(setup.template).__name__} has no BatchNorm layer. "
                "Remove FedBN, or use FedPer(personal=[...])."
            )

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Everything outside BatchNorm layers."""
        private = batch_norm_names(module)
        return [name for name in server.kinds if name not in private]


class Local(FederatedCallback):
    """The siloed baseline: every client trains alone; nothing travels.

    Called Silo in the FENDA-FL paper, CLT in FLIU, Local in PLayer-FL. Optimizers go on from round to round, so that R
    rounds of E epochs are one ordinary training of R*E epochs.
    """

    optimizer_state = "keep"

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Nothing."""
        return []


def part_names(module: nn.Module, names: Sequence[str] | None, num_layers: int) -> list[str]:
    """State names of a part of the module: ``names`` (exact or prefixes), or its last ``num_layers`` layers."""
    return head_names(module, num_layers) if names is None else expand(names, module.state_dict())


def other_names(module: nn.Module, names: Iterable[str]) -> list[str]:
    """All state names that are not among ``names``."""
    part = set(names)
    return [name for name in module.state_dict() if name not in part]


def refuse_no_body(callback: FederatedCallback, setup: Setup, head: Sequence[str]) -> None:
    """Refuse a head that is the whole model.

    Raises:
        ValueError: naming the callback and the layers.
    """
    if len(head) == len(setup.kinds):
        raise ValueError(
            f"{callback.key} leaves nothing to share: {type(setup.template).__name__} has "
            f"{len(ordered_layers(setup.module))} layer(s), all in the head. Put fewer layers there, or use Local()."
        )


def batch_norm_names(module: nn.Module) -> set[str]:
    """State names inside BatchNorm layers (also SyncBatchNorm), by module type."""
    layers = [path for path, child in module.named_modules() if isinstance(child, _BatchNorm)]
    return {name for name in module.state_dict() if any(name.startswith(f"{path}.") for path in layers)}


__all__ = ["FedBN", "FedPer", "LGFedAvg", "Local", "batch_norm_names", "other_names", "part_names", "refuse_no_body"]
