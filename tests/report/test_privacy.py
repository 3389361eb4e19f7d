"""The section of a report about what runs have promised."""

import html
import json

import pytest

from fedlightning.callbacks import ClientDP, FedAvg, SampleDP, SecureAggregation
from fedlightning.report.build import build_report
from tests.helpers import Toy, federate, toy_data

DP = {
    "client": lambda: ClientDP(delta=1e-3, noise_multiplier=2.0, rate=0.5),
    "record": lambda: SampleDP(delta=1e-3, noise_multiplier=2.0),
    "known": lambda: ClientDP(delta=1e-3, noise_multiplier=2.0, noise_seed=0),
}


def page_of(root, callback):
    trainer = federate(Toy(), toy_data((24, 24, 24)), [callback], root, max_rounds=2, local_epochs=1)
    trainer.test()
    build_report(root / "page", [trainer.run.path], metric="loss")
    return trainer.run.path, html.unescape((root / "page" / "report.html").read_text())


@pytest.mark.parametrize("name", DP)
def test_what_is_spent_and_not_counted_stands_in_the_report(name, tmp_path):
    folder, page = page_of(tmp_path, DP[name]())
    told = json.loads((folder / "privacy.json").read_text())
    section = page[page.index('id="privacy"') :]
    assert "What was promised" in section and told["against"] in section and told["in_the_clear"][0] in section
    promises = json.loads((folder / "summary.json").read_text())["promises"]
    assert promises and all(row["cannot_learn"] in section and row["left"] in section for row in promises)
    assert (told["epsilon"] is None) == (name == "known")
    if told["epsilon"] is not None:
        assert f"{told['epsilon']:.3f}" in section


def test_sums_are_promised_too(tmp_path):
    _, page = page_of(tmp_path, SecureAggregation())
    assert "a change: it sees sums of 3 or more" in page[page.index('id="privacy"') :]


def test_without_a_promise_or_with_a_damaged_file_there_is_no_section(tmp_path):
    folder, page = page_of(tmp_path, FedAvg())
    assert "What was promised" not in page
    (folder / "privacy.json").write_text("[1")
    build_report(tmp_path / "page", [folder], metric="loss")
    assert "What was promised" not in (tmp_path / "page" / "report.html").read_text()
