"""Federated fine-tuning by low-rank adapters: FedIT, and its variants that train or share one factor.

They are FFA-LoRA, RoLoRA and FedSA-LoRA.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fedlightning.algorithm import Change, Client, Facts, Need, Phase, Server, Update, WeightingName
from fedlightning.callbacks.shared.low_rank import LowRank, Rank
from fedlightning.ranges import PositiveFloat, ShareBelowOne
from fedlightning.wrappers.adapters import adapted_layers


class FedIT(LowRank):
    """Low-rank adapters on a frozen network: only they train and travel.

    Zhang, Vahidian, Kuo, Li, Zhang, Yu, Wang, Chen, "Towards building the federated GPT: federated instruction tuning",
    ICASSP 2024. Adapters: Hu et al., "LoRA: low-rank adaptation of large language models", ICLR 2022.

    * Client: local training of ``A, B`` of every adapted layer, and of the head if it is to train. Adapted layers
      compute ``W0 x + (alpha / r) B A x``, with ``A`` random and ``B = 0``, so the federation begins with exactly the
      network that was given.
    * Server: ``A = sum_i p_i A_i`` and ``B = sum_i p_i B_i``, each by itself. That is biased: ``mean(B) mean(A)`` is
      not ``mean(B A)``, the mean of what the clients learned. :class:`FFALoRA` avoids it.
    * Down: ``A, B`` and the head. Up: the same. State: none; the frozen ``W0`` is built alike everywhere and never
      travels.
    * Deployed: the network with the mean adapters.

    Normalisation statistics of the frozen network stay as they are. ``fedlightning.wrappers.unmix(module)`` merges the
    adapters into the layers and gives the plain module back. Adapters need ``peft``
    (``pip install peft``).

    Args:
        r: Rank. Default 16 (the authors' code). ``None``: the adapters that are there, as in a ``PeftModel``; all that trains
            in the module travels, of whatever kind, and the other arguments say nothing.
        alpha: Scale; a layer's change counts ``alpha / r``. Default 16 (the authors' code).
        dropout: Dropout on the adapters' input. Default 0.05 (the authors' code).
        target_modules: Paths of ``nn.Linear`` layers, or ends of paths (the authors: ``["q_proj"]`` of LLaMA). ``None``
            (default): every linear layer outside the head.
        head: Name or names of entries or modules that train in full and travel, such as a new classifier
            (``"net.fc"``). ``None`` (default): none.
        weighting: ``"samples"`` (the authors' code, default), ``"uniform"`` or ``"log"``.

    Raises:
        ValueError: If ``r`` is less than 1, ``alpha`` is not positive or ``dropout`` is outside [0, 1).

    Example:
        >>> from fedlightning.callbacks import FedIT
        >>> method = FedIT(r=4, alpha=8, target_modules=["q_proj", "v_proj"], head="net.fc")
        >>> method.alpha / method.r  # the scale of B A
        2.0
    """

    def __init__(
        self,
        r: Rank | None = 16,
        alpha: PositiveFloat = 16,
        dropout: ShareBelowOne = 0.05,
        target_modules: list[str] | None = None,
        head: str | list[str] | None = None,
        weighting: WeightingName | None = None,
    ) -> None:
        super().__init__(dropout, target_modules, head, weighting)
        self.r = r
        self.alpha = alpha

    def size(self) -> tuple[int | None, float]:
        """Return rank and alpha."""
        return self.r, self.alpha


class FFALoRA(FedIT):
    """FedIT with every ``A`` frozen at its random start: only ``B`` trains and travels.

    Sun, Li, Li, Ding, "Improving LoRA in privacy-preserving federated learning", ICLR 2024.

    This halves FedIT's traffic and makes the mean exact: with one ``A`` for all, ``mean(B_i) A = mean(B_i A)``. ``A``
    is drawn from the federation's seed, alike for everybody, so it never travels. A step moves the model less than
    FedIT's: try a larger learning rate. What is kept and deployed, the arguments, their defaults and errors are those
    of :class:`FedIT`.

    Example:
        >>> from fedlightning.callbacks import FedIT, FFALoRA
        >>> FedIT.train_a, FFALoRA.train_a
        (True, False)
    """

    train_a = False


class RoLoRA(FedIT):
    """FedIT in which the two factors take turns: in a round one trains and travels up, and the other one rests.

    Chen, Guo, Ju, Dalal, Zhu, Khisti, "Robust federated finetuning of LLMs via alternating optimization of LoRA", NeurIPS
    2025.

    `B` trains in the first round, since it begins at zero, where `A` has no gradient; `A` in the second, and so on. The
    factor that rests is one for all, so that the mean is exact: `mean(B_i) A = mean(B_i A)`. Down go both factors (a client
    may have missed rounds), up goes the one that trains, half of FedIT's. The head trains in every round. What is kept and
    deployed, the arguments, their defaults and errors are those of :class:`FedIT`.

    Example:
        >>> from fedlightning.callbacks import RoLoRA
        >>> [RoLoRA().resting_factor(round) for round in (0, 1, 2)]
        ['A', 'B', 'A']
    """

    @property
    def facts(self) -> Facts:
        """One factor stays as it is in a round, for whoever would move it."""
        rests = Need("lets one factor rest in a round", ("server_step", "on_reduced", Change.VALUES), "use FFALoRA")
        return super().facts.extend(changes={Change.PARTS}, needs=[rests], asynchronous=False)

    def resting_factor(self, round: int) -> str:
        """Return which factor rests in a round, from 0."""
        return "AB"[round % 2]

    def _resting_names(self, module: nn.Module, round: int) -> set[str]:
        every = f"every_{self.resting_factor(round).lower()}"
        return {name for layer in adapted_layers(module).values() for name in getattr(layer, every)}

    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Train everything but the factor that rests."""
        resting = self._resting_names(client.module, client.round)
        return [Phase(train=tuple(name for name in client.entries if name not in resting))]

    def on_send(self, client: Client, update: Update) -> None:
        """Leave the factor that rests out: the server has it."""
        resting = self._resting_names(client.module, client.round)
        update.state = {name: value for name, value in update.state.items() if name not in resting}


class FedSALoRA(FedIT):
    """FedIT in which only `A` is shared: `B` and the head train too, and stay with their client.

    Guo, Zeng, Wang, Fan, Wang, Qu, "Selective aggregation for low-rank adaptation in federated learning", ICLR 2025.

    `A = sum_i p_i A_i` is what clients have in common, `B_i` is what is their own. Down and up: `A`. State: `B_i` and the
    head at each client. Deployed: the network with `B_i A`; there is no global model, and a client that never trained has
    `B = 0`. Arguments and errors are those of :class:`FedIT`; the authors have `r=8`, `alpha=16`.

    Example:
        >>> from fedlightning.callbacks import FedSALoRA
        >>> FedSALoRA(r=8, alpha=16, head="net.fc").size()
        (8, 16)
    """

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return the names of the first factors."""
        return [name for layer in adapted_layers(module).values() for name in layer.every_a]
