"""PerFCL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import Client, Setup, Update, WeightingName
from fedlightning.callbacks.fenda import FENDA
from fedlightning.callbacks.shared.representations import (
    contrastive_loss,
    features_at_start,
    freeze_teachers,
    teacher_features,
)
from fedlightning.ranges import PositiveFloat, Range
from fedlightning.tensors import clone, module_state
from fedlightning.wrappers import FeatureTap, feature_taps, global_names


class PerFCL(FENDA):
    """FENDA whose two extractors are kept apart by two contrastive losses.

    Zhang, Xu, Wei, Wang, Li, Shang, "Doubly contrastive representation learning for federated image recognition",
    Pattern Recognition 139, 2023.

    With ``con(z, z+, z-) = -log( exp(cos(z, z+)/T) / (exp(cos(z, z+)/T) + exp(cos(z, z-)/T)) )``, frozen teachers in
    eval mode and ``z_g, z_l`` the features of the extractors in training:

    * ``con_g``: to the *received* global extractor, away from the client's *last* global extractor;
    * ``con_l``: to the client's *last* local extractor, away from the *received* global extractor;
    * ``loss = task + mu mean(con_g) + gamma mean(con_l)``.

    What travels and what is kept:

    * Down and up, the model and what is deployed: as in :class:`FENDA`.
    * State: the local extractor, the head, and the global extractor as the client's last visit left it.

    A client's first visit has no last extractors and no terms (FL4Health's implementation). The logged loss stays the
    task's.

    Args:
        mu: Weight of the global term. Default 0.1 (measured); FL4Health's 1 outweighs the task on short visits: accuracy of
            0.764 against 0.811 on digits over ten clients by Dirichlet(0.5), ten rounds, one seed (Local: 0.796), and 0.783
            against 0.788 on FashionMNIST, validation data of three seeds (Local: 0.797). There the extractors differ
            without the terms, too: FENDA has 0.799, at a third of the time.
        gamma: Weight of the local term. Default 0.1, likewise. It needs extractors with features of one width.
        temperature: ``T`` of both. Default 0.5 (FL4Health).
        head: Path of the submodule that turns features into predictions. ``None`` (default): the module holds a
            :class:`~fedlightning.wrappers.DualExtractor` already.
        local_extractor: Another network as the local extractor. ``None`` (default): a twin of the global one.
        fusion: ``"concat"`` (default) or ``"sum"``.
        order: Whose features come first: ``"global_first"`` (default) or ``"local_first"``.
        init: The twin starts as a ``"copy"`` of the extractor (default), or ``"fresh"``.
        local_features: Width of ``local_extractor``, where it cannot be read off its last layer.
        weighting: ``"samples"`` (default) or ``"uniform"``.

    Raises:
        ValueError: If a weight is negative or ``temperature`` is not positive.

    Example:
        >>> from fedlightning.callbacks import PerFCL
        >>> from fedlightning.models import Classifier, TinyNet
        >>> perfcl = PerFCL(mu=0.5, gamma=0.5, head="net.fc2")
        >>> module = perfcl.wrap_module(Classifier(TinyNet(), num_classes=1), "server")
        >>> list(perfcl.feature_taps(module)), perfcl.shared_names(None, module)
        (['z_g', 'z_l'], ['net.fc1.weight', 'net.fc1.bias'])
    """

    def __init__(
        self,
        mu: Annotated[float, Range("[0, inf)", "0 turns it off.")] = 0.1,
        gamma: Annotated[float, Range("[0, inf)", "0 turns it off.")] = 0.1,
        temperature: PositiveFloat = 0.5,
        head: str | list[str] | None = None,
        local_extractor: nn.Module | None = None,
        fusion: Literal["concat", "sum"] = "concat",
        order: Literal["global_first", "local_first"] = "global_first",
        init: Literal["copy", "fresh"] = "copy",
        local_features: int | None = None,
        weighting: WeightingName | None = None,
    ) -> None:
        super().__init__(head, local_extractor, fusion, order, init, local_features, weighting)
        self.mu = mu
        self.gamma = gamma
        self.temperature = temperature

    @property
    def _contrasts(self) -> bool:
        """Whether a contrastive loss is on."""
        return self.mu > 0 or self.gamma > 0

    def claims(self, role: str) -> bool:
        """Decline the loss term where ``mu = gamma = 0``, which is FENDA."""
        return super().claims(role) and not (role == "training_loss" and not self._contrasts)

    def check(self, setup: Setup) -> None:
        """Refuse features that cannot be tapped or have different widths.

        Raises:
            ValueError: If an extractor's features cannot be tapped, or the local term would compare different widths.
        """
        super().check(setup)
        seen = features_at_start(setup, self.feature_taps, self.key) if self._contrasts else {}
        if self.gamma > 0 and seen and seen["z_g"].shape != seen["z_l"].shape:
            widths = f"{seen['z_g'].shape[1]} global and {seen['z_l'].shape[1]} local"
            raise ValueError(
                f"PerFCL compares the two extractors' features, but there are {widths} ones in a sample. Make "
                "local_extractor as wide as the global one, or set gamma=0."
            )

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the features of both extractors."""
        return dict(zip(("z_g", "z_l"), feature_taps(module), strict=True))

    def on_visit_start(self, client: Client) -> None:
        """Freeze the teachers: the received global extractor beside the last local one, and the last global one."""
        if self._contrasts:
            freeze_teachers(client, self.key)

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return ``task + mu mean(con_g) + gamma mean(con_l)``."""
        if self.key not in client.scratch:
            return loss
        received, last = teacher_features(client, self.key, module, batch, self.feature_taps)
        for weight, label, positive, negative in (
            (self.mu, "z_g", received["z_g"], last["z_g"]),
            (self.gamma, "z_l", received["z_l"], received["z_g"]),
        ):
            if weight > 0:
                loss = loss + weight * contrastive_loss(features[label], positive, negative, self.temperature)
        return loss

    def on_send(self, client: Client, update: Update) -> None:
        """Keep the global extractor for the next visit. The local one stays with the client anyway."""
        if client.contributed and self._contrasts:
            u = module_state(client.module, global_names(client.module))
            client.state[self.key] = {"previous": clone(u, "cpu")}
