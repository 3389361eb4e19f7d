"""Free text stays at a site: the message of an exception may quote a patient, and a path names a person."""

from __future__ import annotations

import re
import stat
import sys
from contextlib import nullcontext

import pytest
import torch

from fedlightning.algorithm import ModelSelection
from fedlightning.contract.messages import ClientLog, Update
from fedlightning.deployment.export import Deployed
from fedlightning.options import Evaluation
from fedlightning.sites import message_checks
from fedlightning.sites.message_checks import Texts
from fedlightning.wire import read, write
from tests.sites.helpers import Line, at_sites, sites, together

PATIENT = "Jane Roe, born 1950"


class Raises(ModelSelection):
    """Raises with a patient's name somewhere at the clients, and nowhere at the server."""

    def __init__(self, where: str = "send") -> None:
        self.where = where

    def fail(self, where):
        if where == self.where:
            raise KeyError(f"/data/{PATIENT}/scan.dcm")

    def check(self, setup):
        if self.where == "warns":
            setup.data.first_batch()
            setup.warn(f"odd value of {PATIENT}")
        if self.where == "check":
            setup.data.first_batch()
            raise ValueError(f"no label of {PATIENT}")

    def on_visit_start(self, client):
        self.fail("start")

    def on_send(self, client, update):
        self.fail("send")
        if self.where == "error":
            update.error = f"{PATIENT} has no consent"

    def personal_module(self, client, stage):
        self.fail("personal")
        return client.module

    def claims(self, name):
        return super().claims(name) and (name != "personal_module" or self.where == "personal")

    def on_client_evaluated(self, client, stage, split, metrics, module):
        self.fail("evaluated")


def spoken(line):
    """Note all bytes that sites send."""
    heard: list[bytes] = []
    line.reply = lambda name, data: (heard.append(data), data)[1]
    return heard


def logs(root):
    return "".join(path.read_text() for path in root.rglob(message_checks.FILE))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["start", "send", "error", "personal", "evaluated", "check", "warns"])
@pytest.mark.parametrize("allowed", [False, True], ids=["stays", "sent"])
@pytest.mark.fast_cases(4)
def test_the_text_of_an_error_stays_unless_the_site_sends_it(tmp_path, where, allowed, monkeypatch):
    arguments = {"max_rounds": 1, "sanity_check": where in ("check", "warns"), "evaluation": Evaluation(test_data=[])}
    line = Line(sites(tmp_path / "sites", Raises(where), send_texts=allowed, **arguments))
    heard, told = spoken(line), ""
    try:
        told = str(at_sites(line, tmp_path / "server", Raises(where), **arguments).summary.get("failures", ""))
    except Exception as error:
        told = str(error)
    sent = b"".join(heard).decode("utf-8", "replace")
    assert (PATIENT in sent) == allowed and str(tmp_path) not in sent
    if where != "warns":
        assert (PATIENT in told) == allowed
    if allowed:
        return
    kind = {"check": "ValueError", "error": "", "warns": ""}.get(where, "KeyError")
    (reference, *_) = re.findall(r"reference ([0-9a-f]{8}) in errors\.log there", sent)
    assert (
        kind in sent and f"reference {reference}\n" in logs(tmp_path / "sites") and PATIENT in logs(tmp_path / "sites")
    )
    assert not kind or "Traceback" in logs(tmp_path / "sites")
    assert PATIENT not in "".join(
        path.read_text("utf-8", "replace") for path in (tmp_path / "server").rglob("*.*") if path.is_file()
    )


def test_one_process_says_what_it_said(tmp_path):
    with pytest.raises(RuntimeError, match=PATIENT):
        together(tmp_path, Raises("send"), max_rounds=1)


def test_a_step_that_fails_before_round_1(tmp_path):
    parts = sites(tmp_path / "sites", sanity_check=True)
    for site in parts.values():
        site._blueprint.template.training_step = lambda batch, batch_idx: (_ for _ in ()).throw(ValueError(PATIENT))
    line = Line(parts)
    heard = spoken(line)
    with pytest.raises(
        ValueError, match=r"A step of train data fails for client 'site0', tried before round 1: ValueError \(ref"
    ):
        at_sites(line, tmp_path / "server", sanity_check=True)
    assert PATIENT.encode() not in b"".join(heard) and PATIENT in logs(tmp_path / "sites")


def test_data_that_cannot_be_read_when_the_run_begins(tmp_path):
    parts = sites(tmp_path / "sites")

    def missing(stage):
        raise FileNotFoundError(f"/data/{PATIENT}.csv")

    parts["0"]._data.setup = missing
    line = Line(parts)
    heard = spoken(line)
    with pytest.raises(ValueError, match=r"FileNotFoundError \(reference"):
        at_sites(line, tmp_path / "server")
    assert PATIENT.encode() not in b"".join(heard)


def test_scores_that_are_missing(tmp_path, monkeypatch):
    parts = sites(tmp_path / "sites", sanity_check=False)
    for site in parts.values():
        site._blueprint.template.validation_step = lambda batch, batch_idx: (_ for _ in ()).throw(ValueError(PATIENT))
    line = Line(parts)
    heard = spoken(line)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match=r"ValueError \(reference"):
        at_sites(line, tmp_path / "server", max_rounds=2, sanity_check=False)
    assert PATIENT.encode() not in b"".join(heard) and "ValueError" in b"".join(heard).decode("utf-8", "replace")


def test_our_own_fixed_sentences_leave(tmp_path):
    """A NaN after training is said with the name of the entry, as in one process."""
    parts = sites(tmp_path / "sites", max_rounds=1)
    for site in parts.values():
        for dataset in site._data.whole.data.values():
            dataset.tensors = (dataset.tensors[0] * float("nan"), dataset.tensors[1])
    line = Line(parts)
    with pytest.raises(RuntimeError, match=r"holds NaN or infinite values after training"):
        at_sites(line, tmp_path / "server", max_rounds=1)


def test_what_modules_log_besides_numbers_stays(tmp_path):
    update = Update(0, "a", logs=[ClientLog({"loss": 1.0}, 1), ClientLog({"note": PATIENT}, 1, "add_text")])
    assert [log.method for log in Texts(tmp_path).of_answer(None, update).logs] == ["metrics"]
    update.logs.append(ClientLog({"image": torch.zeros(3)}, 1, "add_image"))
    assert len(Texts(tmp_path, allowed=True).of_answer(None, update).logs) == 2


def test_a_model_is_where_it_is_below_the_sites_folder(tmp_path):
    for allowed in (False, True):
        texts = Texts(tmp_path / "site", allowed)
        for path, said in (("models/run/a.ckpt", "models/run/a.ckpt"), ("../other/a.ckpt", "a.ckpt")):
            answer = Deployed("a", path=str(tmp_path / "site" / path))
            assert texts.of_answer(None, answer).path == said


def test_the_file_is_private_and_does_not_grow_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(message_checks, "LARGEST", 400)
    texts = Texts(tmp_path)
    for number in range(20):
        try:
            raise ValueError(PATIENT)
        except ValueError as error:
            said = texts.of_error(error)
        assert said.startswith("ValueError (reference ") and PATIENT not in said, number
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["errors.log", "errors.old"] and all(path.stat().st_size < 2000 for path in tmp_path.iterdir())
    if sys.platform != "win32":
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())


def test_an_exception_without_a_text_of_its_own(tmp_path):
    class Odd(Exception):
        def __str__(self):
            raise ValueError(PATIENT)

    try:
        raise Odd
    except Odd as error:
        assert re.fullmatch(
            r"Exception \(reference [0-9a-f]{8} in errors\.log there\)", Texts(tmp_path).of_error(error)
        )


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path, capsys):
    (tmp_path / "site").write_text("no folder")
    for error in (ValueError(), ValueError(PATIENT), ValueError("\ud800")):
        assert Texts(tmp_path / "site").of_error(error).startswith("ValueError (reference ")
    assert PATIENT in capsys.readouterr().out


def test_an_error_without_words_is_told_by_its_kind(tmp_path):
    update = Update(
        0, "a", error="client 'a' failed: KeyError", cause=KeyError(), gaps=[("L2", "local", "val", "OSError")]
    )
    left = Texts(tmp_path).of_answer(None, update, [OSError(), KeyError()])
    assert left.error.startswith("client 'a' failed: KeyError (") and left.gaps[0][3].startswith("OSError (")


def test_requests_name_no_text_of_the_server_back(tmp_path):
    site = sites(tmp_path)["0"]
    said = read(site.answer(write({"do": "x" * 1000, "session": ""})))["refused"]
    assert len(said) < 100


class Exits(ModelSelection):
    """Ends the process somewhere, as a script's code may that was made for one run alone."""

    def __init__(self, where: str = "") -> None:
        self.where = where

    def check(self, setup):
        if self.where == "check":
            setup.data.first_batch()
            sys.exit("bye")


def _exit(*args):
    sys.exit("bye")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "where", ["training_step", "validation_step", "configure_optimizers", "check", "setup", "on_save_checkpoint"]
)
def test_an_exit_in_the_users_code_ends_no_site(tmp_path, where):
    """It ended the site where a step was tried, a callback was checked or the data were opened."""
    parts = sites(tmp_path / "sites", Exits(where), sanity_check=True, evaluation=Evaluation(test_data=[]))
    for site in parts.values():
        if where == "setup":
            site._data.setup = _exit
        elif where != "check":
            setattr(site._blueprint.template, where, _exit)
    with pytest.raises(Exception, match="SystemExit") if where != "on_save_checkpoint" else nullcontext():
        at_sites(Line(parts), tmp_path / "server", Exits(where), sanity_check=True, evaluation=Evaluation(test_data=[]))


@pytest.mark.parametrize("ending", [KeyboardInterrupt, GeneratorExit])
def test_what_ends_the_process_ends_the_site(tmp_path, ending):
    (site, _) = sites(tmp_path).values()

    def end(asked):
        raise ending

    site._reply = end
    with pytest.raises(ending):
        site.answer(b"")


def test_the_name_of_a_class_of_the_users_stays(tmp_path):
    """A class can be made with any name, such as that of a row."""
    texts = Texts(tmp_path)
    for bases, known in (((Exception,), "Exception"), ((KeyError,), "KeyError"), ((torch.OutOfMemoryError,), "OutOf")):
        error = type(PATIENT, bases, {})("x")
        said = texts.of_error(error)
        assert PATIENT not in said and said.startswith(known) and PATIENT in texts.file.read_text()
    assert Texts(tmp_path, allowed=True).of_error(error) == "x"
