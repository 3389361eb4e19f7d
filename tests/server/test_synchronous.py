"""Who takes part in a round, what becomes of jobs, what a sum of updates is divided by."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fedlightning.algorithm import ClientSelection, FederatedCallback, Job, Plan, Server, State, Update
from fedlightning.callbacks import SCAFFOLD, FedAvgM, HeteroFL, PLayerFL
from fedlightning.errors import ConfigurationError
from fedlightning.options import FailurePolicy
from fedlightning.server.update_collector import Aggregation
from tests.helpers import Toy, federate, global_state, same, toy_data


class Chosen(ClientSelection):
    """Names the participants of each round."""

    def __init__(self, rounds: list[list[str]]) -> None:
        self.rounds = rounds

    def participants(self, server: Server) -> Sequence[str]:
        return self.rounds[server.round % len(self.rounds)]


class LeaveOut(ClientSelection):
    """Leaves one client out, or changes its work."""

    def __init__(self, client_id: str = "1", work: int | None = None) -> None:
        self.client_id = client_id
        self.work = work

    def on_job(self, server: Server, job: Job) -> Job | None:
        if job.client != self.client_id:
            return job
        return None if self.work is None else replace(job, work=self.work)


class Watch(FederatedCallback):
    """Keeps the updates that plans and rounds see, and the reduced states."""

    def __init__(self) -> None:
        self.seen: list[list[Update]] = []
        self.reduced: list[State] = []

    def plan_round(self, server: Server) -> Plan:
        self.seen.append((yield [server.job(client) for client in server.participants()]))

    def on_reduced(self, server: Server, state: State) -> State:
        self.reduced.append(state)
        return state


def test_a_callback_says_who_takes_part():
    watch = Watch()
    federate(Toy(), toy_data(), [Chosen([["2", "0"], ["1"]]), watch], max_rounds=2)
    assert [[update.client for update in updates] for updates in watch.seen] == [["0", "2"], ["1"]]


def test_nobody_is_an_answer():
    class Noise(Watch):
        def on_reduced(self, server: Server, state: State) -> State:
            self.reduced.append(state)
            return {name: value + 1.0 for name, value in state.items()}

    module, noise = Toy(), Noise()
    trainer = federate(module, toy_data(), [Chosen([[]])], max_rounds=1)
    same(trainer.server.model, module.state_dict())
    trainer = federate(module, toy_data(), [Chosen([[]]), noise], max_rounds=1)
    assert noise.seen == [] and len(noise.reduced) == 1
    for name, value in module.state_dict().items():
        assert torch.equal(trainer.server.model[name], value + 1.0)


@pytest.mark.parametrize(("named", "what"), [(["0", "0"], "twice"), (["9"], "'9', which is not a client")])
def test_wrong_participants_are_refused(named, what):
    with pytest.raises(ConfigurationError, match=what):
        federate(Toy(), toy_data(), [Chosen([named])], max_rounds=1)


def test_two_who_say_who_takes_part_are_refused():
    with pytest.raises(ConfigurationError, match="both say who takes part"):
        federate(Toy(), toy_data(), [Chosen([["0"]])], max_rounds=1, participation=2)


def test_a_plan_that_does_not_ask_is_refused():
    class Everybody(FederatedCallback):
        def plan_round(self, server: Server) -> Plan:
            yield [Job(client) for client in server.clients]

    with pytest.raises(ConfigurationError, match="Everybody plans round 1 without asking"):
        federate(Toy(), toy_data(), [Chosen([["0"]]), Everybody()], max_rounds=1)


def test_a_client_that_is_left_out_is_as_one_that_was_not_chosen():
    module, watch = Toy(), Watch()
    left = federate(module, toy_data(), [LeaveOut("1"), watch], max_rounds=2)
    chosen = federate(module, toy_data(), [Chosen([["0", "2"]])], max_rounds=2)
    same(left.server.model, chosen.server.model)
    assert [update.left_out for update in watch.seen[0]] == [False, True, False]
    assert watch.seen[0][1].error is not None and not left.server.failures


def test_work_is_changed_by_the_job():
    watch = Watch()
    federate(Toy(), toy_data(), [LeaveOut("1", work=3), watch], max_rounds=1, local_steps=2)
    assert [update.steps for update in watch.seen[0]] == [2, 3, 2]


def test_everybody_may_be_left_out():
    class Nobody(ClientSelection):
        def on_job(self, server: Server, job: Job) -> Job | None:
            return None

    module = Toy()
    trainer = federate(module, toy_data(), [Nobody()], max_rounds=2, failures=FailurePolicy(min_clients=2))
    assert trainer.rounds_done == 2 and trainer.server.costs.steps == 0
    same(trainer.server.model, module.state_dict())


def test_a_round_of_nobody_moves_no_momentum():
    """FedAvgM makes no step there, and SCAFFOLD beside it, which looks at what was reduced, changes nothing about that."""
    module, data = Toy(), toy_data()
    for beside in ([], [SCAFFOLD()]):
        callbacks = [*beside, FedAvgM()]
        short = federate(module, data, [Chosen([["0"]] * 2), *callbacks], local_steps=1, max_rounds=2)
        longer = [Chosen([["0"], ["0"], []]), *copy.deepcopy(callbacks)]
        same(global_state(short), global_state(federate(module, data, longer, local_steps=1, max_rounds=3)))


def test_a_job_of_another_client_is_refused():
    class Swap(ClientSelection):
        def on_job(self, server: Server, job: Job) -> Job | None:
            return replace(job, client="0")

    with pytest.raises(ConfigurationError, match=r"Swap\.on_job was asked about a job of client '1'"):
        federate(Toy(), toy_data(), [Swap()], max_rounds=1)


@pytest.mark.parametrize("method", [HeteroFL, PLayerFL])
def test_planned_rounds_go_on_without_those_left_out(method):
    watch = LeaveOut("1")
    trainer = federate(Toy(), toy_data(), [method(), watch], max_rounds=2, gradient_clip_val=1.0)
    assert trainer.rounds_done == 2 and not trainer.server.failures


class First(FederatedCallback):
    """Takes the first update."""

    def reduce(self, server: Server, updates: list[Update]) -> State:
        return updates[0].state


class Divide(FederatedCallback):
    """Divides by a number of its own."""

    def __init__(self, by: float | None) -> None:
        self.by = by

    def denominator(self, server: Server) -> float | None:
        return self.by


def test_a_sum_of_changes_is_divided_by_what_a_callback_names():
    module = Toy()
    start = module.state_dict()

    def change(*callbacks: FederatedCallback) -> State:
        trainer = federate(module, toy_data(), list(callbacks), max_rounds=1)
        return {name: value.double() - start[name].double() for name, value in trainer.server.model.items()}

    plain = change()
    total = sum(federate(Toy(), toy_data(), max_rounds=1).server.num_samples.values())
    for by, factor in ((None, 1.0), (float(total), 1.0), (2.0 * total, 0.5), (total / 4, 4.0)):
        for name, value in change(Divide(by)).items():
            torch.testing.assert_close(value, factor * plain[name], atol=2e-6, rtol=0)
    with pytest.raises(ConfigurationError, match="must be a positive number"):
        change(Divide(0.0))
    with pytest.raises(ConfigurationError, match="First combines updates in a way of its own"):
        change(Divide(2.0), First())


def test_a_late_update_is_folded_in_where_the_model_is_now():
    server = federate(Toy(), toy_data(), [], max_rounds=1).server
    sent = {name: torch.full_like(value, 0.5) for name, value in server.model.items()}
    trained = {name: value + 0.25 for name, value in sent.items()}
    before = dict(server.model)
    aggregation = Aggregation(server)
    aggregation.fold(Update(0, "0", state=trained, num_samples=3, contributed=True), base=sent)
    aggregation.finish()
    for name, value in before.items():
        torch.testing.assert_close(server.model[name], value + 0.25)
    fresh = Aggregation(server)
    now = {name: value.clone() for name, value in server.model.items()}
    fresh.fold(Update(0, "0", state=trained, num_samples=3, contributed=True), base=now)
    fresh.finish()
    same(server.model, trained)  # nothing has moved: the update as it came
