"""What leaves a site in its greeting is what its declaration says, byte for byte."""

from __future__ import annotations

import itertools
import math
import re
import stat
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from fedlightning.callbacks import FedMD, SampleDP
from fedlightning.client.data_summary import DataSummary, _hash
from fedlightning.datamodules.groups import hash_samples
from fedlightning.sites.agreement import LEAVES, own_key
from fedlightning.wire import read, write
from tests.sites.helpers import SHARES, Line, a_site, at_sites, sites


def greetings(line: Line, root: Path, algorithm=None, public=False) -> list[bytes]:
    """Return what sites answer to greetings, as bytes."""
    found, hellos = list[bytes](), []
    line.watch = lambda node, data: (hellos.append(read(data).get("do") == "hello"), data)[1]

    def note(name, data):
        if hellos and "answer" in read(data) and isinstance(read(data)["answer"], dict):
            found.append(data)
        return data

    line.reply = note
    at_sites(line, root, algorithm, public=public)
    return found


def test_every_field_of_a_real_greeting_is_declared_and_described(tmp_path):
    """Of which the page of the reference is made."""
    first, *_ = greetings(Line(sites(tmp_path / "sites")), tmp_path / "server")
    answer = read(first)["answer"]
    described = {field.name for field in fields(DataSummary)}
    assert {*answer} - {"data"} | described == {*LEAVES} and isinstance(answer["data"], DataSummary)
    attributes = str(DataSummary.__doc__).partition("Attributes:")[2]
    assert described == set(re.findall(r"^ {8}(\w+): ", attributes, re.MULTILINE))


def test_the_bytes_hold_what_the_page_says_and_no_more(tmp_path):
    """Every value that the data could be known by is looked for in the bytes themselves."""
    made = sites(tmp_path / "sites")
    first, *_ = greetings(Line(made), tmp_path / "server")
    told, data = read(first)["answer"]["data"], made["0"]._data
    plain = made["0"]._session.runner.describe(details=("classes", "splits", "loaders", "public", "public content"))
    assert plain.content is not None and plain.public_content is not None and plain.splits["train"]
    for value in (plain.content, *plain.splits.values(), plain.public_content, plain.public_print, plain.module):
        assert value.encode() not in first
    counts = [data.class_counts(client) for client in SHARES[0]]
    assert all(counts) and set(told.classes.values()) == {None} and told.public is None and told.public_print is None
    assert told.sizes == {client: plain.sizes[client] for client in SHARES[0]} and told.batches and told.loaders
    assert set(told.splits) == {"train", "val", "test", "code"} and told.content


@pytest.mark.filterwarnings("ignore:SampleDP")
@pytest.mark.parametrize("private", [True, False])
def test_a_private_greeting_is_the_same_whatever_is_trained_on(tmp_path, private):
    """A hash with the site's key told from run to run whether a record was still the one that it had been."""
    pytest.importorskip("opacus", reason="SampleDP counts with Opacus")
    algorithm, said = SampleDP(delta=1e-3, noise_multiplier=1.0, noise_seed=0) if private else None, []
    for run in ("one", "two"):
        there = sites(tmp_path / "sites", algorithm)
        if run == "two":
            for number, site in there.items():
                for split in ("train", "val"):
                    x, y = site._data.whole.data[SHARES[int(number)][0], split].tensors
                    x[0], y[0] = x[0] + 1.0, (y[0] + 1) % 3
        said.append(read(greetings(Line(there), tmp_path / run, algorithm)[0])["answer"]["data"])
    assert (said[0] == said[1]) is private and set(said[0].splits) == {"train", "val", "test", "code"}


def test_a_server_that_asks_for_more_is_told_no_more(tmp_path):
    """What is told is the site's to say: neither a greeting nor a later question widens it."""
    from fedlightning.wire import write

    line, said = Line(sites(tmp_path / "sites")), []

    def ask(node, data):
        asked = read(data)
        if asked["do"] == "hello":
            more = write({**asked, "parts": ["classes", "splits", "public", "public content", "pooled"]})
            assert "is not part of it" in read(line.sites[node](more))["refused"]
            return data
        more = line.sites[node](write({**asked, "do": "describe", "leave_out": [], "parts": ["classes", "pooled"]}))
        assert "is not part of it" in read(more)["refused"]
        question = {"do": "describe", "session": asked["session"], "leave_out": []}
        said.append(read(line.sites[node](write(question)))["answer"])
        return data

    line.watch = ask
    at_sites(line, tmp_path / "server")
    assert said and all(set(one.classes.values()) == {None} and one.public is None and not one.pooled for one in said)


def test_public_data_are_told_of_where_the_server_has_them(tmp_path):
    method = FedMD()
    first, *_ = greetings(Line(sites(tmp_path / "sites", method)), tmp_path / "server", method, public=True)
    told = read(first)["answer"]["data"]
    assert told.public and told.public_print and told.public_content and set(told.classes.values()) == {None}


def test_a_small_table_is_not_recognised(tmp_path):
    """Who guesses the table can make its hash, but not the one that is told; today's and yesterday's are comparable."""

    def table(values) -> str:
        x = torch.tensor(values, dtype=torch.float32).reshape(-1, 1)
        return _hash({"site0": hash_samples(TensorDataset(x, torch.zeros(len(x))))})

    guesses = {table(values) for values in itertools.product((0, 1), repeat=3)}
    assert len(guesses) > 1
    told = []
    for name in ("one", "one", "other"):
        first, *_ = greetings(Line(sites(tmp_path / name)), tmp_path / f"{name} server {len(told)}")
        told.append(read(first)["answer"]["data"])
    assert told[0] == told[1]  # another process of the same site: its key is in its folder
    assert told[0].splits != told[2].splits and told[0].content != told[2].content
    assert told[0].sizes == told[2].sizes


def test_a_key_is_its_users_and_stays(tmp_path):
    site = a_site(tmp_path / "site", SHARES[0])
    key = tmp_path / "site" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_bytes()) == 32
    assert own_key(key) == key.read_bytes() == a_site(tmp_path / "site", SHARES[0])._key == site._key
    assert own_key(tmp_path / "other" / "key") != site._key
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["key"]


@pytest.mark.parametrize(
    "skew, said", [(0.0, None), (60.0, "60 s ahead of"), (-60.0, "60 s behind"), (math.nan, None), ("x", None)]
)
def test_a_clock_that_is_wrong_is_said_when_a_site_comes(tmp_path, skew, said):
    """Flower refuses requests by their times, and says no more than that."""
    line = Line(sites(tmp_path / "sites"))

    def late(node, data):
        content = read(data)
        answer = content.get("answer")
        if isinstance(answer, dict) and "site1" in answer.get("clients", ()):
            answer["time"] = skew if isinstance(skew, str) else answer["time"] + skew
        return write(content)

    line.reply = late
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        at_sites(line, tmp_path / "server")
    texts = [str(one.message) for one in found if "NTP" in str(one.message)]
    assert len(texts) == (said is not None)
    assert said is None or f"The clock of site 'home of site1' is at least {said} this machine's" in texts[0]
