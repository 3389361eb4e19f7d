"""FedMultimodal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.algorithm import Change, Client, Facts, FederatedCallback, Need, Setup, Update, WeightingName
from fedlightning.callbacks.shared.modalities import Parts, encoders_of, parts_of, refuse_blind_training, samples_with

HOLDERS = Need(
    "averages an encoder over the clients that have its modality, and not over all",
    (Change.IN_STEP,),
    "set holders_only=False",
)


class FedMultimodal(FederatedCallback):
    """Federated averaging of several modalities: an encoder is averaged over the clients that have its modality.

    Feng, Bose, Zhang, Hebbar, Ramakrishna, Gupta, Zhang, Avestimehr, Narayanan, "FedMultimodal: a benchmark for multimodal
    federated learning", KDD 2023. The networks are ``MultimodalNet``'s, the corruptions those of ``MultimodalDataModule``.

    * Client: local training on what it has. An encoder whose modality it lacks gets no gradient and is not sent.
    * Server: ``w = sum_i p_i w_i``. For the encoder of a modality the sum is over the clients that have it: the others would
      return it as it was, and so pull it back to the last round.
    * Down: ``w``. Up: ``w_i`` without the encoders of modalities that the client lacks. State: none.
    * Deployed: the global model.

    With ``holders_only=False`` it is the benchmark's FedAvg, in which those who lack a modality count. Beside FedProx and
    server optimizers it is used as FedAvg is: they are further callbacks. SCAFFOLD needs ``holders_only=False``: its control
    variate is a mean over all clients.

    What would be wrong in silence is refused: before round 1 a module that trains an encoder on samples without its
    modality, or has no finite loss on them; at a client an encoder that has moved nevertheless.

    Args:
        encoders: By modality, names or prefixes of the entries of its encoder. ``None`` (default): the submodules of the
            ``ModuleDict`` called ``encoders``.
        holders_only: Average an encoder over the clients that have its modality. Default True.
        weighting: ``"samples"`` (default), ``"uniform"`` or ``"log"``.

    Raises:
        ValueError: Before round 1, if the module has no encoders or a batch other modalities.

    Example:
        >>> from fedlightning.callbacks import FedMultimodal
        >>> FedMultimodal(encoders={"audio": ["net.encoders.audio"]}).weighting
        'samples'
    """

    def __init__(
        self, encoders: Parts | None = None, holders_only: bool = True, weighting: WeightingName | None = "samples"
    ) -> None:
        self.encoders, self.holders_only, self.weighting = encoders, holders_only, weighting

    @property
    def facts(self) -> Facts:
        """Encoders without samples are left out."""
        if not self.holders_only:
            return Facts(counts_steps=True)
        return Facts(changes={Change.PARTS}, needs=[HOLDERS], counts_steps=True)

    def check(self, setup: Setup) -> None:
        """Refuse modules without encoders, and those that train an encoder without its modality."""
        encoders = encoders_of(setup, self.encoders, self.key)
        refuse_blind_training(setup, encoders, self.key)

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Count the samples of this visit that have each modality; the loss stays as it is."""
        seen = samples_with(batch, list(parts_of(module, self.encoders, "encoders")))
        before = client.scratch.get(self.key)
        client.scratch[self.key] = seen if before is None else before.to(seen.device) + seen
        return loss

    def on_send(self, client: Client, update: Update) -> None:
        """Leave out the encoders of modalities that no sample of this visit had.

        Raises:
            ValueError: If such an encoder has moved.
        """
        if self.key not in client.scratch:
            return
        parts = parts_of(client.module, self.encoders, "encoders")
        for (modality, names), count in zip(parts.items(), client.scratch[self.key].tolist(), strict=True):
            moved = [name for name in names if count == 0 and client.lr_sums.get(name)]
            if moved:
                raise ValueError(
                    f"no sample has {modality!r}, but '{moved[0]}' of its encoder has been trained; let the network leave "
                    "out inputs that are NaN"
                )
            if count == 0 and self.holders_only:
                update.state = {name: value for name, value in update.state.items() if name not in names}
