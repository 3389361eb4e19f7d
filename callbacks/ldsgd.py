"""LD-SGD."""

from __future__ import annotations

from typing import Annotated

from fedlightning.algorithm import Facts, Plan, Server, Update, requires
from fedlightning.callbacks.shared.gossip import Gossip, of_a_random_graph
from fedlightning.ranges import Range, make_init
from fedlightning.topology import MixingWeights, Topology

EARLIER = "mixing"
"""Tag of a round's visits before its last."""


@of_a_random_graph
@make_init
class LDSGD(Gossip):
    """Local D-SGD: in a round each client takes local steps alone, then some steps that each end in an average of neighbours.

    Li, Yang, Wang, Zhang, "Communication-efficient local decentralized SGD methods", 2019; naming as in SWIFT's code.

    A round is ``I1`` steps without communication (the trainer's ``local_steps``), then ``I2`` times a step and
    ``x_i = sum_j W_ij y_j``: all ``I1 + I2`` steps compute a gradient. ``I2 = 1`` is PD-SGD with ``I1 + 1`` steps. For
    several averages without steps between them use :class:`DFedAvg` with ``mixings``.

    * Over every link, both ways: ``y_i``, ``I2`` times a round.
    * State: ``x_i`` at each node.
    * Deployed: ``x_i`` (stages L1 and L2, which is the model after the round's last step). Stage G is the consensus average
      ``(1/n) sum_i x_i``, which no node holds.

    Set ``local_steps``. For momentum set ``optimizer_state="keep"``, else it begins anew after every average.

    Args:
        topology: Who is whose neighbour; see :class:`DFedAvg`.
        weights: With which weights they mix; see :class:`DFedAvg`.
        edge_probability: For ``"erdos_renyi"``.
        graph_seed: For ``"erdos_renyi"``: the graph does not change with the run's seed.
        i2: Steps of a round that end in an average. Default 2 (ours; 1 would be PD-SGD).

    Raises:
        ValueError: If ``i2`` is below 1.

    Example:
        >>> from fedlightning.callbacks import LDSGD
        >>> LDSGD(i2=3).claims("plan_round")
        True
    """

    topology: Topology = "ring"
    weights: MixingWeights = "metropolis"
    edge_probability: float = 0.5
    graph_seed: int = 0
    i2: Annotated[int, Range("[1, inf)", "Use Local for no average of neighbours.")] = 2

    @property
    def facts(self) -> Facts:
        """A round has visits of `I1 + 1` steps."""
        steps = requires.LocalSteps(
            "counts steps: I1 alone, I2 that end in an average", "Set local_steps=I1, or use DFedAvg."
        )
        memory = [requires.LastingMemory("visits a client for one step at a time", warns=True)] if self.i2 > 1 else []
        return super().facts.extend(requires=[steps, *memory], most_work=lambda usual: usual + 1)

    def plan_round(self, server: Server) -> Plan:
        """Plan ``I1 + 1`` steps, an average, and then ``I2 - 1`` times one step and an average."""
        participants = server.participants()
        alone = server.blueprint.settings.work
        for visit in range(self.i2):
            tag = EARLIER if visit < self.i2 - 1 else ""
            yield [server.job(client, work=1 if visit else alone + 1, tag=tag) for client in participants]
            if tag:
                yield []

    def on_update(self, server: Server, update: Update) -> None:
        """Leave the scores of a round's earlier visits out: stage L2 is the model after its last step."""
        if update.tag == EARLIER:
            update.evaluations.clear()
            update.metrics.clear()
