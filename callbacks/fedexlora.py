"""FedEx-LoRA: adapters are averaged, and what that misses of the mean change is merged into the network."""

from __future__ import annotations

import torch

from fedlightning.algorithm import Change, Facts, Need, Server, State, Update, WeightingName
from fedlightning.callbacks.shared.low_rank import MergedStacks, Rank, mean_of_rest, singular_factors
from fedlightning.ranges import PositiveFloat, ShareBelowOne
from fedlightning.tensors import WeightedMean
from fedlightning.wrappers.adapters import adapted_layers

ONE_PRODUCT = Need(
    "merges into the network what the product of the mean factors lacks",
    ("plan_round", "server_step", "on_reduced", Change.KEEPS, Change.PARTS),
    "use FedIT in its place",
)


class FedExLoRA(MergedStacks):
    r"""FedIT whose aggregation is exact: the residual of the mean is merged into the frozen network.

    Singhal, Ponkshe, Vepakomma, "FedEx-LoRA: exact aggregation for federated and efficient fine-tuning of large language
    models", ACL 2025.

    * Client: as :class:`FedIT`; the factors go on from round to round.
    * Server: `A = sum_i p_i A_i`, `B = sum_i p_i B_i`, and with `s = alpha / r`
      `W <- W + s (sum_i p_i B_i A_i - B A)`, so that `W + s B A` is the old `W` with the mean of the clients' changes. (The
      authors' code has equal weights.)
    * Up: `A_i, B_i` and the head. Down: `A, B`, the head, and of each adapted layer the residual as the factors
      `[p_i (B_i - B)]` and `[s (A_i - A_m)]`, `i < m`: as many numbers as :class:`FLoRA`'s stack. A client that has missed
      rounds gets theirs too, or `W` where that is smaller.
    * State: the server keeps `W`, residuals that are smaller than their layer, and what each client has; a client keeps `W`.
    * Deployed: the merged network with the mean adapters.

    **Exact is not convergent.** Where clients differ the residual does not vanish at a stationary point, so that `W` drifts:
    on three least-squares clients the distance to the mean's minimiser falls to 0.39 in 30 rounds and is 2.4 after 400, where
    FedIT stays at 0.23. Stop early. Adapters need `peft` (`pip install peft`).

    Args:
        r: Rank. Default 4 (paper).
        alpha: Scale; a layer's change counts `alpha / r`. Default 8 (paper).
        dropout: Dropout on the adapters' input. Default 0.1 (paper).
        target_modules: Paths of `nn.Linear` layers, or ends of paths. `None` (default): every linear layer outside the head.
        head: Names of entries or modules that train in full and are averaged, such as a new classifier (`"net.fc"`).
        residual_rank: Rank to which the residual is cut, by its singular values. `None` (default): all of it.
        weighting: `"samples"` (default), `"uniform"` (the authors' code) or `"log"`.

    Raises:
        ValueError: If a rank is less than 1, `alpha` is not positive or `dropout` is outside [0, 1).

    Example:
        >>> from fedlightning.callbacks import FedExLoRA
        >>> FedExLoRA(target_modules=["query", "value"]).size()
        (4, 8)
    """

    @property
    def facts(self) -> Facts:
        """A residual is that of one mean of both factors, of all clients that trained."""
        return super().facts.extend(needs=[ONE_PRODUCT])

    def __init__(
        self,
        r: Rank = 4,
        alpha: PositiveFloat = 8,
        dropout: ShareBelowOne = 0.1,
        target_modules: list[str] | None = None,
        head: str | list[str] | None = None,
        residual_rank: Rank | None = None,
        weighting: WeightingName | None = None,
    ) -> None:
        super().__init__(dropout, target_modules, head, weighting)
        self.r = r
        self.alpha = alpha
        self.residual_rank = residual_rank

    def size(self) -> tuple[int, float]:
        """Return rank and alpha."""
        return self.r, self.alpha

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Return the mean of the factors and of the head, and the network with the residual."""
        counting, new = mean_of_rest(server, updates)
        changes = {}
        for path, layer in adapted_layers(server.module).items() if counting else ():
            mean = WeightedMean()
            for update, share in counting:
                mean.add({name: update.state[name] for name in (*layer.every_a, *layer.every_b)}, share)
            new |= mean.result()
            b, last, others = new[layer.b], counting[-1][0].state[layer.a], counting[:-1]
            left = [(update.state[layer.b] - b) * share for update, share in others]
            right = [(update.state[layer.a] - last) * (self.alpha / self.r) for update, _ in others]
            factors = torch.cat([b[:, :0], *left], dim=1), torch.cat([last[:0], *right])
            if self.residual_rank is not None and others:
                cut, rank = singular_factors(*factors, self.residual_rank), self.residual_rank
                factors = b.new_zeros(len(b), rank), last.new_zeros(rank, last.shape[1])  # a message tells one size
                factors[0][:, : len(cut[1])], factors[1][: len(cut[1])] = cut
            changes[path] = factors
        return new | self.merge(server, changes) if counting else {}
