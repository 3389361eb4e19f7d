"""Federated fine-tuning by low-rank adapters: FedIT and FFA-LoRA."""

from __future__ import annotations

from fedlightning.algorithm import WeightingName
from fedlightning.callbacks.shared.low_rank import LowRank, Rank
from fedlightning.ranges import PositiveFloat, ShareBelowOne


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
        r: Rank. Default 16 (the authors' code).
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
        r: Rank = 16,
        alpha: PositiveFloat = 16,
        dropout: ShareBelowOne = 0.05,
        target_modules: list[str] | None = None,
        head: str | list[str] | None = None,
        weighting: WeightingName | None = None,
    ) -> None:
        super().__init__(dropout, target_modules, head, weighting)
        self.r = r
        self.alpha = alpha

    def size(self) -> tuple[int, float]:
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
