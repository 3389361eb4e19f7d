"""Arguments that contradict each other are refused before round 1, in a sentence."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from fedlightning.algorithm import ClientSelection
from fedlightning.arguments.inputs import evaluated_clients
from fedlightning.callbacks import CFL, IFCA, MAPPER, FedCovid, FedGroup, FedSoft, FeSEM, FeSEMMA, HypCluster
from fedlightning.contract import CallbackList, FederatedCallback
from fedlightning.errors import ConfigurationError
from fedlightning.guards.preflight import PreflightQuestions
from fedlightning.server.loop import Synchronous
from fedlightning.server.population import Participation, Population
from fedlightning.virtual_time import Asynchronous, FixedSpeed, VirtualClock


class Chooses(ClientSelection):
    def participants(self, server):
        return server.clients


class Reduces(FederatedCallback):
    def reduce(self, server, updates):
        return updates[0].state


class Divides(FederatedCallback):
    def denominator(self, server, updates):
        return 1.0


def of_server(*callbacks, participation=1.0, samples=5, rounds=10):
    clients = ["a", "b", "c"]
    return SimpleNamespace(
        callbacks=CallbackList(list(callbacks)),
        participation=Participation(participation),
        population=Population(dict.fromkeys(clients, samples)),
        clients=clients,
        held_out=[],
        max_rounds=rounds,
        num_samples=dict.fromkeys(clients, samples),
        participants=lambda: clients[: round(participation * 3)],
        blueprint=None,
        is_mixed=False,
    )


def questions(server=None, needed=1, **federation):
    engine = SimpleNamespace(
        attempts=SimpleNamespace(policy=SimpleNamespace(min_clients=needed)),
        data_here=federation.pop("data_here", True),
        sites=federation.pop("sites", {}),
    )
    return PreflightQuestions(SimpleNamespace(server=server or of_server(), engine=engine, **federation))


MORE = {
    "num_clusters": [IFCA(num_clusters=4), HypCluster(num_clusters=4), FeSEM(4), FeSEMMA(4), FedGroup(4), FedSoft(4)],
    "min_size": [CFL(min_size=4)],
    "selected": [FedSoft(selected=4)],
    "large": [FedCovid(large=4)],
}


@pytest.mark.parametrize(("name", "callback"), [(name, one) for name, ones in MORE.items() for one in ones], ids=repr)
def test_more_clients_than_there_are(name, callback):
    with pytest.raises(
        ConfigurationError, match=rf"{type(callback).__name__} got {name}=4, and .* 3 clients. Use 3 at"
    ):
        questions(of_server(callback), loop=Synchronous()).counts()
    setattr(callback, name, 3)
    questions(of_server(callback), loop=Synchronous()).counts()


def test_more_clients_than_there_are_without_a_callback():
    with pytest.raises(ConfigurationError, match="The trainer got participation=4"):
        questions(of_server(participation=4), loop=Synchronous()).counts()
    with pytest.raises(ConfigurationError, match="Synchronous got first=4"):
        questions(loop=Synchronous(VirtualClock(FixedSpeed(1.0)), first=4)).counts()
    with pytest.raises(ConfigurationError, match="Evaluation got clients=4"):
        evaluated_clients(4, ["a", "b", "c"], 0)
    assert evaluated_clients(3, ["a", "b", "c"], 0) == ["a", "b", "c"]


def test_a_default_is_nobodys_claim():
    for callback in (IFCA(), CFL()):
        server = of_server(callback)
        server.clients = ["a"]
        questions(server, loop=Synchronous()).counts()


def test_a_share_is_no_number_of_clients():
    questions(of_server(FedCovid(large=1.0), participation=1.0), loop=Synchronous()).counts()


def test_more_rounds_than_the_run_has():
    with pytest.warns(UserWarning, match="CFL got start_round=5, and the run has 4 rounds"):
        questions(of_server(CFL(start_round=5), rounds=4), loop=Synchronous()).counts()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        questions(of_server(CFL(start_round=4), MAPPER(warmup=0.5), rounds=4), loop=Synchronous()).counts()


def test_two_that_say_who_takes_part():
    with pytest.raises(ConfigurationError, match=r"participation=0\.5 and Chooses both say"):
        questions(of_server(Chooses(), participation=0.5), 1).participation()


def test_two_that_say_how_updates_are_combined():
    with pytest.raises(ConfigurationError, match=r"Divides names the number .* and Reduces combines"):
        questions(of_server(Reduces(), Divides()), 1).participation()


def test_rounds_with_fewer_clients_than_needed():
    with pytest.raises(ConfigurationError, match="min_clients=3, but a round visits 1 of the 3"):
        questions(of_server(participation=0.4), 3).participation()
    questions(of_server(participation=0.4), 1).participation()
    questions(of_server(Chooses()), 3).participation()  # how many it takes is not known before


def test_nobody_with_a_training_sample():
    with pytest.raises(ValueError, match="None of the 3 clients has a training sample"):
        questions(of_server(samples=0), 1).participation()


def test_data_that_nobody_has_together():
    with pytest.warns(UserWarning, match="pooled data and other clients' data are left out"):
        questions(left_out=["pooled", "clients"], evaluate_data=("local",)).data_elsewhere()
    with pytest.raises(ConfigurationError, match="on pooled data only"):
        questions(left_out=["pooled"], evaluate_data=()).data_elsewhere()
    questions(left_out=[], evaluate_data=()).data_elsewhere()


def loop_of(loop, is_here=True, evaluate_seconds=None):
    store = SimpleNamespace(is_here=is_here)
    questions(loop=loop, store=store, evaluate_seconds=evaluate_seconds).loop()


def test_a_loop_without_a_clock_counts_no_virtual_seconds():
    with pytest.raises(ConfigurationError, match="has no clock"):
        loop_of(Synchronous(), evaluate_seconds=10.0)


def test_a_loop_that_holds_records_back_has_them_here():
    with pytest.raises(ConfigurationError, match="Asynchronous carries out visits before they count"):
        loop_of(Asynchronous(), is_here=False)
    loop_of(Asynchronous())


def claims(sizes, sites):
    questions(
        SimpleNamespace(num_samples=sizes, blueprint=None, is_mixed=False), data_here=False, sites=sites
    ).claimed_sizes()


def test_a_claim_of_nearly_all_samples_is_told_of():
    """Nobody at the server can check it: the size is as greeted, and it weighs."""
    with pytest.warns(UserWarning, match=r"client 'b' at site 'rome' says .* 1000000000 .* 100\.0% of all.* is 40\b"):
        claims({"a": 20, "b": 10**9, "c": 40, "d": 50}, {"b": "rome"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        claims({"a": 20, "b": 3900, "c": 40, "d": 50}, {})
        claims({"a": 20, "b": 10**9}, {})  # who of two is it?
        claims({}, {})
