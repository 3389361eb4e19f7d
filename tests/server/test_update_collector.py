"""What becomes of updates as they come: what of them is counted."""

from __future__ import annotations

from fedlightning import FederatedCallback
from fedlightning.contract import Job
from tests.helpers import Toy, federate, toy_data


class CollectsLater(FederatedCallback):
    """Lets everybody train, and collects the models in a second list of jobs."""

    def plan_round(self, server):
        yield [Job(client, returns=()) for client in server.clients]
        yield [Job(client, work=0, returns=server.returned_names()) for client in server.clients]


def test_steps_of_a_model_that_is_collected_later_count_once():
    plain, later = (federate(Toy(), toy_data(), callbacks, max_rounds=2) for callbacks in ([], [CollectsLater()]))
    assert later.server.costs.steps == plain.server.costs.steps > 0
    assert later.server.costs.bytes_up == plain.server.costs.bytes_up > 0
