"""Sites that start anew, hang, say nonsense or refuse; a server that starts anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlightning.callbacks import SCAFFOLD, FedProx
from fedlightning.contract.messages import Message, Update
from fedlightning.deployment.export import Deploy
from fedlightning.engines.attempts import TooFewClientsError
from fedlightning.engines.contract import Visit
from fedlightning.errors import ConfigurationError
from fedlightning.options import FailurePolicy
from fedlightning.resume.config_changes import differences
from fedlightning.sites.agreement import agreement
from fedlightning.sites.engine import DataElsewhere
from fedlightning.testing import runs
from fedlightning.testing.toys import federate
from fedlightning.virtual_time import Asynchronous
from fedlightning.wire import read, write
from tests.sites.helpers import SHARES, Line, a_site, answers_in, at_sites, changed, sites, tasks_in, together
from tests.sites.test_equal import rows

METHOD = SCAFFOLD()  # every client keeps a state of its own


def same(one, other):
    return runs.same_tree(one.server.models, other.server.models) and rows(one) == rows(other)


def visits_of(data, round):
    return any(isinstance(task, Visit) and task.message.round == round for task in tasks_in(data))


def updates_of(data):
    return {(answer.round, answer.client) for answer in answers_in(data) if isinstance(answer, Update)}


def test_a_site_that_is_killed_in_a_visit_and_starts_anew(tmp_path):
    """What it was sent is lost with its memory; its disk is there."""
    one = together(tmp_path / "one", METHOD, max_rounds=3)
    line = Line(sites(tmp_path / "sites", METHOD, max_rounds=3))
    killed = []

    def kill(node, data):
        if node == "1" and visits_of(data, 1) and not killed:
            killed.append(node)
            line.sites[node] = a_site(tmp_path / "sites" / "1", SHARES[1], METHOD, max_rounds=3).answer
        return data

    line.watch = kill
    other = at_sites(line, tmp_path / "server", METHOD, max_rounds=3)
    assert killed and same(one, other)


def test_a_site_that_dies_between_its_disk_and_its_reply(tmp_path):
    """The new record is on its disk, and nobody knows: the visit is done again from the old one."""
    one = together(tmp_path / "one", METHOD, max_rounds=3)
    line = Line(sites(tmp_path / "sites", METHOD, max_rounds=3))
    lost = []

    def lose(name, data):
        if (1, "site0") in updates_of(data) and not lost:
            lost.append(name)
            line.sites["0"] = a_site(tmp_path / "sites" / "0", SHARES[0], METHOD, max_rounds=3).answer
            return None
        return data

    line.reply = lose
    other = at_sites(line, tmp_path / "server", METHOD, max_rounds=3)
    assert lost and same(one, other)


def test_every_third_reply_gets_lost_on_the_way(tmp_path):
    """The connection says so, as Flower does for a node that is gone: greetings, questions and tasks are sent again."""
    one = together(tmp_path / "one", METHOD)
    line, count = Line(sites(tmp_path / "sites", METHOD)), [0]

    def lose(name, data):
        count[0] += 1
        return data if count[0] % 3 else write({"lost": ""})

    line.reply = lose
    assert same(one, at_sites(line, tmp_path / "server", METHOD))


def test_a_site_that_comes_back_under_another_name(tmp_path):
    one = together(tmp_path / "one", METHOD)
    line = Line(sites(tmp_path / "sites", METHOD))

    def move(node, data):
        if "1" in line.sites and node == "1" and visits_of(data, 1):
            del line.sites["1"]
            line.sites["2"] = a_site(tmp_path / "sites" / "1", SHARES[1], METHOD).answer
        return data

    line.watch = move
    assert same(one, at_sites(line, tmp_path / "server", METHOD))


def test_a_site_that_comes_back_with_other_data_takes_no_part(tmp_path):
    """As many samples of the same clients, so that no number tells: a resumed run would be refused, and so is the site."""
    line, changed_data = Line(sites(tmp_path / "sites")), []

    def change(node, data):
        if node == "1" and visits_of(data, 1) and not changed_data:
            site = a_site(tmp_path / "sites" / "1", SHARES[1])
            for dataset in site._data.whole.data.values():
                dataset.tensors = (dataset.tensors[0] + 1, dataset.tensors[1])
            changed_data.append(node)
            line.sites[node] = site.answer
        return data

    line.watch = change
    with pytest.warns(UserWarning, match="home of site1' comes back with other clients or data than those with which"):
        run = at_sites(line, tmp_path / "server")
    left_out = {(entry["round"], entry["client"]) for entry in run.server.failures if entry["where"] == "training"}
    assert changed_data and left_out == {(2, "site1"), (2, "site2")}


def test_a_refused_site_that_comes_back_mended_takes_part_again(tmp_path):
    """Under the same node: over Flower that is the site's key."""
    line, states = Line(sites(tmp_path / "sites", max_rounds=3)), []

    def change(node, data):
        if node == "1" and visits_of(data, 1) and not states:
            states.append("refused")
            line.sites[node] = a_site(tmp_path / "sites" / "1", (*SHARES[1], "site0")).answer
        if node == "0" and visits_of(data, 2):
            states.append("gone")
            del line.sites["1"]
        return data

    def come(name, data):
        if "1" not in line.sites:
            states.append("back")
            line.sites["1"] = a_site(tmp_path / "sites" / "1", SHARES[1], max_rounds=3).answer
        return data

    line.watch, line.reply = change, come
    with pytest.warns(UserWarning, match="does not take part"):
        run = at_sites(line, tmp_path / "server", max_rounds=3)
    left_out = {(entry["round"], entry["client"]) for entry in run.server.failures if entry["where"] == "training"}
    assert states == ["refused", "gone", "back"] and left_out == {(2, "site1"), (2, "site2")}


def test_a_server_that_is_killed_goes_on_where_it_was(tmp_path):
    """The sites are a round and a half further than the state that was saved: they go back to its round."""
    one = together(tmp_path / "one", METHOD, max_rounds=4)
    parts = sites(tmp_path / "sites", METHOD, max_rounds=4)
    line = Line(parts)

    def stop(name, data):
        if (3, "site2") in updates_of(data):
            raise runs.Stopped
        return data

    line.reply = stop
    with pytest.raises(runs.Stopped):
        at_sites(line, tmp_path / "server", METHOD, max_rounds=4, save_state=2)
    other = at_sites(Line(parts), tmp_path / "server", METHOD, max_rounds=4, save_state=2, resume=True)
    assert other.rounds_done == 4 and same(one, other)
    folder = next((tmp_path / "sites" / "0" / "records").glob("*"))
    assert len(list((tmp_path / "sites" / "0" / "records").glob("*"))) == 1 and folder.is_dir()


def test_old_records_are_removed_and_those_that_are_needed_stay(tmp_path):
    parts = sites(tmp_path / "sites", METHOD, max_rounds=6)
    trainer = at_sites(Line(parts), tmp_path / "server", METHOD, max_rounds=6)
    records, store = parts["0"].records, trainer.federation.store
    found = records.versions(store.run, "site0")
    assert store.version("site0") in found and 2 <= len(found) <= 4
    assert set(store.needed("site0")) <= set(found)


def test_a_site_that_hangs_is_a_failed_client(tmp_path):
    line = Line(sites(tmp_path / "sites"))
    line.watch = lambda node, data: None if node == "1" and visits_of(data, 1) else data
    trainer = at_sites(line, tmp_path / "server")
    failed = {(one["round"], one["client"]) for one in trainer.summary["failures"]}
    assert failed == {(2, "site1"), (2, "site2")} and trainer.rounds_done == 2
    assert all("failures.timeout=30" in one["reason"] for one in trainer.summary["failures"])


def test_too_few_clients_end_the_run(tmp_path):
    line = Line(sites(tmp_path / "sites"))
    line.watch = lambda node, data: None if node == "1" and visits_of(data, 1) else data
    with pytest.raises(TooFewClientsError, match="min_clients"):
        at_sites(line, tmp_path / "server", failures=FailurePolicy(min_clients=3, timeout=30.0))


@pytest.mark.parametrize(
    "reply, reason",
    [
        (b"nonsense", "header"),
        (write({"answer": 3}), "answers with a int"),
        (write({"answer": Update(1, "site0", num_samples=3)}), "client="),
        (write({"answer": Update(1, "site1"), "version": "../x", "note": {}}), "no version"),
        (write({"refused": "nobody is at home"}), "nobody is at home"),
        (write([1]), "says nothing"),
    ],
    ids=["bytes", "number", "another client's", "version", "refusal", "list"],
)
@pytest.mark.fast_cases(3)
def test_nonsense_is_a_failed_client(tmp_path, reply, reason):
    line = Line(sites(tmp_path / "sites"))

    def replaced(answer, part):
        return reply if isinstance(answer, Update) and (answer.round, answer.client) == (1, "site1") else part

    line.reply = lambda name, data: changed(data, replaced)
    trainer = at_sites(line, tmp_path / "server")
    (failed,) = trainer.summary["failures"]
    assert (failed["round"], failed["client"]) == (2, "site1") and reason in failed["reason"]


def test_scores_that_were_not_asked_for_are_refused(tmp_path):
    line = Line(sites(tmp_path / "sites"))

    def renamed(scores, part):
        if isinstance(scores, list) and scores and scores[0].client == "site1":
            object.__setattr__(scores[0], "client", "site0")
            return write({**read(part), "answer": scores})
        return part

    line.reply = lambda name, data: changed(data, renamed)
    trainer = at_sites(line, tmp_path / "server")
    assert any("not asked for" in one["reason"] for one in trainer.summary["failures"])


# -- what a site refuses -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments, full, named",
    [
        ({"local_steps": 5}, False, "local_steps was 2 and is 5"),
        ({"algorithm": FedProx(mu=0.3)}, False, "callbacks"),
        ({"seed": 4}, False, "seed was 0 and is 4"),
        ({}, True, "model"),
    ],
    ids=["steps", "method", "seed", "model"],
)
def test_another_configuration_is_refused_before_round_1(tmp_path, arguments, full, named):
    line = Line(sites(tmp_path / "sites", **arguments, full=full))
    with pytest.raises(ConfigurationError, match="The run does not begin: ") as refused:
        at_sites(line, tmp_path / "server")
    assert named in str(refused.value)


def test_another_version_of_torch_at_a_site_is_said(tmp_path):
    line = Line(sites(tmp_path / "sites"))

    def changed(found):
        answer = found.get("answer")
        if isinstance(answer, dict) and answer.get("name", "").endswith("site1"):
            answer["versions"] = {**answer["versions"], "torch": "1.0\x1b"}
        return found

    line.reply = lambda name, data: write(changed(read(data)))
    with pytest.warns(UserWarning, match=r"Site 'home of site1' has torch 1\.0[^\x1b]*, the server") as told:
        at_sites(line, tmp_path / "server")
    assert sum("last bits" in str(one.message) for one in told) == 1


@pytest.mark.parametrize("how", ["list", "tensor", "buffer", "array"])
def test_a_value_that_a_module_holds_is_compared(tmp_path, how):
    """Weights of a loss are not a plain option and do not travel: other ones at a site would train another model."""

    def hold(site, value):
        module = site._blueprint.template
        kept = {"list": [1.0, value], "tensor": torch.tensor([1.0, value]), "array": np.array([1.0, value])}
        if how == "buffer":
            module.register_buffer("class_weights", torch.tensor([1.0, value]), persistent=False)
        else:
            module.class_weights = kept[how]
        return agreement(site._blueprint)

    parts = sites(tmp_path / "sites")
    one, other = hold(parts["0"], 2.0), hold(parts["1"], 5.0)
    assert one == hold(parts["1"], 2.0)
    (found,) = differences(one, other)
    assert found.startswith("model.class_weights (held) was ")
    with pytest.raises(ConfigurationError, match=r"model\.class_weights \(held\) was not there and is"):
        at_sites(Line(parts), tmp_path / "server")


def asked(site, session, task, **more):
    one = {"task": task, "number": "1", "version": "", **more}
    said = read(site.answer(write({"do": "tasks", "session": session, "tasks": [one], "budget": 5.0})))
    return read(said["answer"][0]) if "answer" in said else said


def test_a_task_that_comes_again_is_not_done_again(tmp_path):
    """Its reply got lost: the site has it still, and trains nothing twice."""
    line, seen = Line(sites(tmp_path / "sites", METHOD)), []
    line.watch = lambda node, data: (seen.append((node, data)), data)[1]
    at_sites(line, tmp_path / "server", METHOD)
    node, request = next(one for one in reversed(seen) if visits_of(one[1], 1))
    site = line.sites[node].__self__
    run = next((tmp_path / "sites" / node / "records").glob("*")).name
    client = SHARES[int(node)][0]
    session = seen[-1] and read(seen[-1][1])["session"]
    again = {**read(request), "session": session, "budget": 1e9}
    before = len(site.records.versions(run, client))
    first, second = (site.answer(write(again)) for _ in range(2))
    assert first == second and len(site.records.versions(run, client)) <= before + 1


def test_what_a_site_does_not_carry_out(tmp_path):
    line, seen = Line(sites(tmp_path / "sites")), []
    line.watch = lambda node, data: (seen.append(read(data)["session"]), data)[1]
    at_sites(line, tmp_path / "server")
    site, session = a_site(tmp_path / "sites" / "0", SHARES[0]), seen[-1]
    message = Message(0, "site0", {}, ())
    assert "unknown" in asked(site, session, Deploy(message))
    site = line.sites["0"].__self__
    assert "do not leave" in asked(site, session, Deploy(message))["refused"]
    assert "do not leave" in asked(site, session, Deploy(message, write=True, folder="/etc"))["refused"]
    assert "has no client 'site1'" in asked(site, session, Deploy(Message(0, "site1", {}, ()), write=True))["refused"]
    assert "is not a task" in asked(site, session, message)["refused"]
    assert "is not in" in asked(site, session, Deploy(message, write=True), version="0" * 32)["refused"]
    assert "not names of a run" in asked(site, session, Deploy(message, write=True), version="../../etc")["refused"]
    assert "no site does" in read(site.answer(write({"do": "shell", "session": session})))["refused"]
    assert "not a request" in read(site.answer(write([1])))["refused"]
    assert "refused" in read(site.answer(b"\0" * 30))


def test_a_loop_that_holds_records_back_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="Asynchronous carries out visits before they count"):
        at_sites(Line(sites(tmp_path / "sites")), tmp_path / "server", loop=Asynchronous())


def test_two_sites_with_one_client(tmp_path):
    parts = sites(tmp_path / "sites") | {"2": a_site(tmp_path / "other", ("site2",))}
    with pytest.raises(ConfigurationError, match="has a client that site"):
        at_sites(Line(parts), tmp_path / "server")


def test_a_server_without_a_connection_or_a_timeout_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="fedlightning serve"):
        federate(None, DataElsewhere(), tmp_path, engine="flower", failures=FailurePolicy(timeout=1.0))
    with pytest.raises(ConfigurationError, match=r"failures\.timeout"):
        at_sites(Line(sites(tmp_path / "sites")), tmp_path / "server", failures=FailurePolicy(timeout=None))
