"""Federated fine-tuning by low-rank adapters: FedIT and FFA-LoRA."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import LightningModule
from torch import nn

from fedlightning.algorithm import FederatedCallback, Server, WeightingName, expand
from fedlightning.wrappers.adapters import adapter_names, add_adapters


class FedIT(FederatedCallback):
    r"""Low-rank adapters on a frozen network; only they train and travel.

    Zhang, Vahidian, Kuo, Li, Zhang, Yu, Wang, Chen, "Towards building the federated GPT: federated instruction tuning",
    ICASSP 2024. Adapters: Hu et al., "LoRA: low-rank adaptation of large language models", ICLR 2022.

    Down and up: ``A, B`` of every adapted layer (and the head, if it is to train). State: none; the frozen ``W0`` is
    built alike everywhere and never travels. Adapted layers compute ``W0 x + (alpha / r) B A x``, with ``A`` random and
    ``B = 0``, so the federation begins with exactly the network that was given. Server: ``A = sum_i p_i A_i`` and
    ``B = sum_i p_i B_i``, each by itself. That is biased: ``mean(B) mean(A)`` is not ``mean(B A)``, the mean of what
    the clients learned; :class:`FFALoRA` avoids it.

    Normalisation statistics of the frozen network stay as they are. ``fedlightning.wrappers.unmix(module)`` merges the
    adapters into the layers and gives the plain module back.

    Args:
        r: rank (the authors' code: 16).
        alpha: scale; a layer's change counts ``alpha / r`` (the authors' code: 16).
        dropout: on the adapters' input (the authors' code: 0.05).
        target_modules: paths of ``nn.Linear`` layers, or ends of paths (the authors: ``["q_proj"]`` of LLaMA);
            ``None``: every linear layer outside the head.
        head: names or module prefixes that train in full and travel, such as a new classifier (``["net.fc"]``).
        weighting: ``"samples"`` (the authors' code), ``"uniform"`` or ``"log"``.
    """

    train_a = True

    def __init__(
        self,
        r: int = 16,
        alpha: float = 16,
        dropout: float = 0.05,
        target_modules: list[str] | None = None,
        head: list[str] | None = None,
        weighting: WeightingName | None = None,
    ) -> None:
        if r < 1 or alpha <= 0 or not 0.0 <= dropout < 1.0:
            raise ValueError(
                f"{self.key} got r={r}, alpha={alpha}, dropout={dropout}. An adapter needs a rank of at least 1, a "
                "positive scale and a dropout in [0, 1)."
            )
        self.r = r
        self.alpha = alpha
        self.dropout = dropout
        self.target_modules = target_modules
        self.head = head
        self.weighting = weighting

    def wrap_module(self, module: LightningModule, owner: str) -> LightningModule:
        """Freeze everything but the head and put adapters in; the same bits for every owner.

        Raises:
            ImportError: peft is not installed.
            ValueError: no such layer, or none at all.
        """
        return add_adapters(
            module,
            r=self.r,
            alpha=self.alpha,
            dropout=self.dropout,
            target_modules=self.target_modules,
            head=expand(self.head or [], module.state_dict()),
            train_a=self.train_a,
        )

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """The adapters and the head."""
        return adapter_names(module)

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """The frozen network with the mean adapters, unless another callback keeps some of them private."""
        private = set(adapter_names(server.module)) - set(server.shared_names())
        return None if private else server.module_with(server.model)


class FFALoRA(FedIT):
    """FedIT with every ``A`` frozen at its random start: only ``B`` trains and travels.

    Sun, Li, Li, Ding, "Improving LoRA in privacy-preserving federated learning", ICLR 2024.

    Half of FedIT's traffic, and an exact mean: with one ``A`` for all, ``mean(B_i) A = mean(B_i A)``. ``A`` is drawn
    from the federation's seed, alike for everybody, so it never travels. It moves less per step than FedIT: try a
    larger learning rate. Arguments and defaults: those of :class:`FedIT`.
    """

    train_a = False


__all__ = ["FFALoRA", "FedIT"]
