"""FLoRA: adapters of differing ranks, stacked instead of averaged and merged into the network in every round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    Job,
    Message,
    Need,
    Server,
    State,
    Update,
    WeightingName,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.low_rank import ClientRanks, MergedStacks, Rank, mean_of_rest, refuse_other_rank
from fedlightning.ranges import PositiveFloat, ShareBelowOne
from fedlightning.wrappers.adapters import adapted_layers

NEW_ADAPTERS = Need(
    "merges the adapters into the network after every round and begins with new ones",
    ("plan_round", "server_step", "on_reduced", Change.VALUES, Change.KEEPS, Change.PARTS),
    "use FedIT in its place",
)


class FLoRA(MergedStacks, ClientRanks):
    r"""Low-rank adapters of differing ranks whose sum of products is exact: they are stacked and merged in every round.

    Wang, Shen, He, Sun, Wang, Lyu, Li, "FLoRA: federated fine-tuning large language models with heterogeneous low-rank
    adaptations", NeurIPS 2024.

    * Client: trains fresh adapters of its rank `r_i` beside the frozen network, `W x + (alpha_i / r_i) B_i A_i x`. In every
      visit `A_i` is drawn anew (a function of seed, round and client) and `B_i = 0`.
    * Server: with `p_i` the client's weight, `B = [B_1 ... B_m]` and `A = [p_1 (alpha_1 / r_1) A_1; ...; p_m ... A_m]`,
      so that `B A = sum_i p_i (alpha_i / r_i) B_i A_i` exactly, where :class:`FedIT` averages the factors. It merges:
      `W <- W + B A`.
    * Up: `A_i, B_i` and the head. Down, for each adapted layer: the stacks of the rounds that the client has missed (the
      last round's, if it was there), or the merged `W`, whichever is smaller. A stack grows with the number of clients in a
      round; for small layers and many clients `W` is smaller than it. Both give the client the server's very bits.
    * State: the server keeps `W`, stacks that are smaller than their layer, and what each client has; a client keeps `W`.
    * Deployed: the merged network. `fedlightning.wrappers.unmix(module)` gives the plain module.

    As everything is merged and begins anew, nothing that is tied to the factors of a round goes with it: server optimizers,
    control variates, parts that stay at a client, kept optimizers. They are refused. Adapters need `peft`
    (`pip install peft`).

    Args:
        r: Rank for all, a list dealt to the clients in turn, or a table by client. Default `(16, 8, 4)`.
        alpha: Scale, likewise; a layer's change counts `alpha_i / r_i`. `None` (default): twice the rank, as the authors'
            code.
        dropout: Dropout on the adapters' input. Default 0.05, as :class:`FedIT`.
        target_modules: Paths of `nn.Linear` layers, or ends of paths. `None` (default): every linear layer outside the head.
        head: Names of entries or modules that train in full and are averaged, such as a new classifier (`"net.fc"`).
        weighting: `"samples"` (default), `"uniform"` or `"log"`.

    Raises:
        ValueError: If a rank is less than 1, an alpha is not positive or `dropout` is outside [0, 1).

    Example:
        >>> from fedlightning.callbacks import FLoRA
        >>> method = FLoRA(r={"rome": 8, "oslo": 2}, target_modules=["q_proj"])
        >>> method.largest, method.size()
        (8, (8, 16.0))
    """

    @property
    def facts(self) -> Facts:
        """The adapters become a part of the network after every round, and new ones begin."""
        fresh = requires.FreshOptimizers("begins every visit with new adapters")
        changes = {Change.SMALLER, Change.ONE_WAY}
        return super().facts.extend(changes=changes, needs=[NEW_ADAPTERS], requires=[fresh])

    def __init__(
        self,
        r: Rank | Sequence[Rank] | dict[str, Rank] = (16, 8, 4),
        alpha: PositiveFloat | Sequence[PositiveFloat] | dict[str, PositiveFloat] | None = None,
        dropout: ShareBelowOne = 0.05,
        target_modules: list[str] | None = None,
        head: str | list[str] | None = None,
        weighting: WeightingName | None = None,
    ) -> None:
        self.refuse_empty(r=r, alpha=alpha)
        super().__init__(r, dropout, target_modules, head, weighting)
        self.alpha = alpha

    def size(self) -> tuple[int, float]:
        """Return the largest rank, and an alpha: clients have their own, and the server's adapters are zero."""
        return self.largest, 2.0 * self.largest

    def scale_of(self, server: Server, client: str) -> float:
        """Return a client's `alpha_i / r_i`."""
        rank = self.rank_of(server, client)
        return 2.0 if self.alpha is None else float(self._of(self.alpha, server, client, 2.0 * rank)) / rank

    def options_by_client(self) -> dict[str, Any]:
        """Return ranks and alphas."""
        return {**super().options_by_client(), "alpha": self.alpha}

    # -- before round 1 ------------------------------------------------------------------------------------------------
    def wire(self, module: Any) -> Wire:
        """Declare the scale beside rank and stacks."""
        return Wire(down={**super().wire(module).down, "scale": "scalar"})

    # -- a round -------------------------------------------------------------------------------------------------------
    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send what the client lacks of the merged network, and no adapters."""
        super().on_broadcast(server, job, message)
        message.extras[self.key]["scale"] = self.scale_of(server, job.client)
        for layer in adapted_layers(server.module).values():
            for name in (*layer.every_a, *layer.every_b):
                message.state.pop(name, None)

    def on_receive(self, client: Client, message: Message) -> None:
        """Merge the stacks that came into the network, and make the adapters new."""
        super().on_receive(client, message)
        now = client.entries
        fresh: State = {}
        for path, layer in adapted_layers(client.module).items():
            fresh[layer.b] = torch.zeros_like(now[layer.b])
            if message.work != 0:
                draw = client.rng(f"adapter {path}")
                fresh[layer.a] = nn.init.kaiming_uniform_(torch.empty_like(now[layer.a]), math.sqrt(5), generator=draw)
        message.state |= fresh
        client.received |= fresh  # what terms in the gradient, as FedProx's, pull to

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse factors of another rank than the client's."""
        refuse_other_rank(server, update, self.rank_of(server, update.client))

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Return the merged network and the mean head."""
        counting, new = mean_of_rest(server, updates)
        changes = {}
        for path, layer in adapted_layers(server.module).items() if counting else ():
            a = torch.cat(
                [share * self.scale_of(server, sent.client) * sent.state[layer.a] for sent, share in counting]
            )
            changes[path] = torch.cat([sent.state[layer.b] for sent, _ in counting], dim=1), a
        return new | self.merge(server, changes) if counting else {}
