"""FlexLoRA: the mean of the clients' products, divided by its singular values into adapters of each client's rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedlightning.algorithm import (
    Change,
    Facts,
    Job,
    Message,
    Need,
    Server,
    State,
    Update,
    WeightingName,
    facts,
    requires,
)
from fedlightning.callbacks.shared.low_rank import (
    ClientRanks,
    Rank,
    mean_of_rest,
    refuse_other_rank,
    singular_factors,
    truncated,
)
from fedlightning.ranges import PositiveFloat, ShareBelowOne
from fedlightning.wrappers.adapters import adapted_layers

NEW_FACTORS = Need(
    "makes new factors out of the mean of products after every round",
    ("server_step", Change.KEEPS, Change.PARTS),
    "use FedIT or HetLoRA in its place",
)


class FlexLoRA(ClientRanks):
    r"""Low-rank adapters of differing ranks: their products are averaged, and each client gets the best part of its rank.

    Bai, Chen, Qian, Yao, Li, "Federated fine-tuning of large language models under heterogeneous tasks and client resources",
    NeurIPS 2024.

    * Client: `W x + s B_i A_i x` with the frozen network and adapters of its rank `r_i`.
    * Server: `M = sum_i p_i B_i A_i = U S V` (singular values, without `M` itself); `B = U sqrt(S)` and `A = sqrt(S) V`, cut
      to the largest rank. (The paper leaves open where `S` goes; the root on both sides balances the gradients.) By
      Eckart-Young no other adapters of a rank are nearer to the mean of the clients' changes.
    * Down: the first `r_i` rows of `A` and columns of `B`, and the head. Up: `A_i, B_i` and the head. State: none.
    * Deployed: each client the network with its first `r_i` rows; the server's model has all rows.

    Where ranks differ, components beyond the smallest rank lose in every round the share of the clients without them: a
    rank that few clients have dies out. A component whose singular value is zero keeps its row of `A`, with `B = 0`, so
    that it can learn again.

    The scale `s = alpha / max r` is one for all clients. Adapters need `peft` (`pip install peft`).

    Args:
        r: Rank for all, a list dealt to the clients in turn, or a table by client. Default 8 (paper: the baselines' rank).
        alpha: Scale; a layer's change counts `alpha` over the largest rank. Default 16.
        dropout: Dropout on the adapters' input. Default 0.05, as :class:`FedIT`.
        target_modules: Paths of `nn.Linear` layers, or ends of paths. `None` (default): every linear layer outside the head.
        head: Names of entries or modules that train in full and are averaged, such as a new classifier (`"net.fc"`).
        weighting: `"samples"` (default), `"uniform"` or `"log"`.

    Raises:
        ValueError: If a rank is less than 1, `alpha` is not positive or `dropout` is outside [0, 1).

    Example:
        >>> from fedlightning.callbacks import FlexLoRA
        >>> FlexLoRA(r=[8, 4]).size()
        (8, 16)
    """

    @property
    def facts(self) -> Facts:
        """Factors are new after every round; clients have their own ranks."""
        fresh = requires.FreshOptimizers("makes new factors after every round")
        needs = [facts.WHOLE_MODELS_OF_CLIENTS, NEW_FACTORS]
        return super().facts.extend(changes={Change.SMALLER}, needs=needs, requires=[fresh])

    def __init__(
        self,
        r: Rank | Sequence[Rank] | dict[str, Rank] = 8,
        alpha: PositiveFloat = 16,
        dropout: ShareBelowOne = 0.05,
        target_modules: list[str] | None = None,
        head: str | list[str] | None = None,
        weighting: WeightingName | None = None,
    ) -> None:
        self.refuse_empty(r=r)
        super().__init__(r, dropout, target_modules, head, weighting)
        self.alpha = alpha

    def size(self) -> tuple[int, float]:
        """Return the largest rank, and alpha."""
        return self.largest, self.alpha

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Cut the adapters to the client's rank."""
        super().on_broadcast(server, job, message)
        rank = message.extras[self.key]["rank"]
        message.state = truncated(message.state, adapted_layers(server.module).values(), rank)

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse factors of another rank than the client's."""
        refuse_other_rank(server, update, self.rank_of(server, update.client))

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Return the factors of the mean of products, and the mean head."""
        counting, new = mean_of_rest(server, updates)
        for layer in adapted_layers(server.module).values() if counting else ():
            stacked = torch.cat([update.state[layer.a] * share for update, share in counting])
            left, right = singular_factors(
                torch.cat([update.state[layer.b] for update, _ in counting], 1), stacked, self.largest
            )
            a, b = server.model[layer.a].clone(), torch.zeros_like(server.model[layer.b])
            a[: len(right)], b[:, : len(right)] = right.to(a.dtype), left.to(b.dtype)
            new |= dict.fromkeys(layer.every_a, a) | dict.fromkeys(layer.every_b, b)
        return new
