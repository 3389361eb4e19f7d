"""Nothing that is read from a run's folder runs code: pickles are planted in every kind of file, under right checksums."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import zipfile
from signal import SIGTERM

import pytest
import torch

import fedlightning

# isort: split
from fedlightning.cli import main
from fedlightning.codec.allowed import UntrustedError, path_of
from fedlightning.deployment.checkpoints import Exporter
from fedlightning.errors import DamagedStateError
from fedlightning.storage.files import UnreadableError
from tests.helpers import Toy
from tests.resume.gadgets import forged, object_of, partial_of
from tests.resume.planted import PLANTS, as_archive, evaluate, make_run, repack, resume, rewrite, rewrite_values, sign

SENTENCES = (
    ValueError,
    FileNotFoundError,
)  # UnreadableError, UntrustedError, DamagedStateError and DamagedMetricsError are
KINDS = {
    "template": "checkpoints/last/template.safetensors",
    "server": "checkpoints/last/server-000002.safetensors",
    "records": "checkpoints/last/records-000002-0.safetensors",
    "manifest": "checkpoints/last/manifest.json",
    "global checkpoint": "checkpoints/global.ckpt",
    "client checkpoint": "checkpoints/clients/1.ckpt",
    "metrics": "metrics.csv",
    "summary": "summary.json",
    "configuration": "config.yaml",
    "lock": ".lock",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("planted")
    make_run(root)
    return root


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs" / "run" / "version_0"


@pytest.fixture
def flag(tmp_path):
    flag = tmp_path / "evil"
    yield flag
    assert not flag.exists(), "planted code has run"


def test_the_plants_would_run(tmp_path):
    """What is planted does its work where it is let: else the tests below say nothing."""
    as_archive(tmp_path / "a.pt", tmp_path / "evil")
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "evil").is_dir()


def report(run, out):
    """A report without figures for print."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedlightning.report.context.save", lambda *given: None)
        main(["report", str(run), "--out", str(out)])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in ("lock", "metrics") else kind for kind in KINDS]
)
@pytest.mark.parametrize(
    "plant", [pytest.param(plant, marks=pytest.mark.slow if number else ()) for number, plant in enumerate(PLANTS)]
)
def test_a_planted_pickle_does_not_run(run, flag, kind, plant, capsys):
    path, root = run / KINDS[kind], run.parents[1]
    PLANTS[plant](path, flag)
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        sign(run / "checkpoints" / "last")
    readers = {
        "checkpoints/last": (functools.partial(resume, root), functools.partial(evaluate, root)),
        "checkpoints": (functools.partial(fedlightning.load, path),),
        "": (
            functools.partial(resume, root),
            functools.partial(report, run, root / "out"),
        ),
    }
    place = next(place for place in readers if KINDS[kind].startswith(place))
    for read in readers[place]:
        with contextlib.suppress(*SENTENCES):
            read()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["template.safetensors", "server-000002.safetensors", "records-000002-0.safetensors"])
def test_a_state_that_names_code_is_refused_in_a_sentence(run, flag, name):
    last = run / "checkpoints" / "last"
    as_archive(last / name, flag)
    sign(last)
    with pytest.raises(DamagedStateError, match=rf"{name} cannot be read: its header claims .* bytes"):
        resume(run.parents[1])


CONTENT = {
    "a number": lambda content: 3,
    "a list": lambda content: [content],
    "no names": lambda content: {},
    "other types": lambda content: dict.fromkeys(content, 3.5),
    "other types inside": lambda content: {name: {"a": 1} for name in content},
    "more names": lambda content: content | {"more": 1},
    "of code": lambda content: dict.fromkeys(content, SIGTERM),
}


@pytest.mark.parametrize("name", ["template.safetensors", "server-000002.safetensors", "records-000002-0.safetensors"])
@pytest.mark.parametrize("content", CONTENT)
def test_other_content_in_a_valid_file_is_refused_in_a_sentence(run, name, content):
    last = run / "checkpoints" / "last"
    rewrite_values(last / name, CONTENT[content])
    sign(last)
    harmless = {
        ("template.safetensors", "no names"),
        ("records-000002-0.safetensors", "more names"),
    }  # nothing is taken from them
    if (name, content) in harmless:
        resume(run.parents[1])
        return
    with pytest.raises(
        ValueError, match=r"^The state in .* (is damaged: .*|began with a different module\. Resume with .*)\.$"
    ):
        resume(run.parents[1])


@pytest.mark.parametrize("file", ["../../../metrics.csv", "/etc/passwd", "a/b.safetensors", "..", "", 3, None, ["x"]])
def test_a_manifest_names_files_of_its_folder_only(run, file):
    last = run / "checkpoints" / "last"
    for changes in ({"server": file}, {"clients": {"0": file}}):
        sign(last, **changes)
        with pytest.raises(
            DamagedStateError, match=r"is not a manifest: it names the file .*, which is not in its folder"
        ):
            resume(run.parents[1])


@pytest.mark.parametrize(
    "changes",
    [{"version": "3"}, {"rounds_done": -1}, {"rounds_done": 1.5}, {"clients": []}, {"extra": 3}, {"packs": {"a": -1}},
     {"extra": {"metrics": 3}}, {"extra": {"history": [3]}}, {"extra": {"lasting": []}}, {"extra": {"seconds": "x"}}],
    ids=str,
)  # fmt: skip
def test_a_manifest_of_other_types_is_refused_in_a_sentence(run, changes):
    sign(run / "checkpoints" / "last", **changes)
    with pytest.raises(DamagedStateError, match=r"manifest\.json is not a manifest"):
        resume(run.parents[1])


def test_a_state_of_another_version_is_named(run):
    sign(run / "checkpoints" / "last", version=99)
    with pytest.raises(ValueError, match=r"written by another version of FedLightning \(format 99"):
        resume(run.parents[1])


def test_a_state_of_the_format_before_is_named(run):
    """It is not translated: nothing with it was released."""
    sign(run / "checkpoints" / "last", version=2)
    with pytest.raises(
        ValueError, match=r"written by another version of FedLightning \(format 2, this one reads 3\). Resume"
    ):
        resume(run.parents[1])


def test_packed_files_are_refused(run):
    """An archive that was packed could hold more than the memory does."""
    repack(run / "checkpoints" / "global.ckpt", zipfile.ZIP_DEFLATED)
    with pytest.raises(UnreadableError, match="it is packed, which such a file never is"):
        fedlightning.load(run / "checkpoints" / "global.ckpt")


class Wrapper(Toy):
    """A wrapped module, for the exporter."""


def exported(tmp_path, change):
    path = tmp_path / "module.ckpt"
    Exporter(lambda architecture: Toy()).save(path, Wrapper(), {})

    def changed(content):
        own = change(content["fedlightning"])
        state = {name: value for name, value in content["state_dict"].items() if "wrapped" in own or "(" not in name}
        return content | {"fedlightning": own, "state_dict": state}

    rewrite(path, changed)
    return path


def evil_tree(path):
    """A partial of a function where a module holds its activation: called as soon as the module is used."""
    state = Wrapper().__reduce_ex__(2)[2] | {"activation": partial_of("os:mkdir", path)}
    return forged(object_of(path_of(Wrapper), state))


def test_a_tree_that_names_a_function_needs_trust(tmp_path):
    path = exported(tmp_path, lambda own: own | {"wrapped": evil_tree(str(tmp_path / "evil"))})
    with pytest.raises(UntrustedError, match=r"it names os\.mkdir, which may do more than compute.*trust=\['os'\]"):
        fedlightning.load(path, trust=["tests"])
    assert fedlightning.load(path, trust=["posix", "os", "tests"]).activation.func is os.mkdir
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "name", ["os:mkdir", "subprocess:Popen", "lightning.pytorch:Trainer", "no.such.module:Class", 3, None]
)
def test_a_class_that_is_no_imported_module_is_refused(tmp_path, name):
    path = exported(tmp_path, lambda own: {"class": name})
    with pytest.raises(
        (UntrustedError, UnreadableError), match=r"module\.ckpt is (not opened: it names|not a checkpoint)"
    ):
        fedlightning.load(path)


def test_a_class_elsewhere_is_imported_with_trust_only(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text("from tests.helpers import Toy\nclass Mine(Toy): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = exported(tmp_path, lambda own: {"class": "elsewhere:Mine"})
    with pytest.raises(UntrustedError, match=r"names the class elsewhere:Mine, .*trust=\['elsewhere'\]"):
        fedlightning.load(path)
    assert type(fedlightning.load(path, trust=["elsewhere"])).__name__ == "Mine"


def test_a_pickled_module_is_not_opened_even_with_trust(tmp_path):
    import pickle

    pickled = torch.frombuffer(bytearray(pickle.dumps(Wrapper())), dtype=torch.uint8)
    path = exported(tmp_path, lambda own: own | {"wrapped": pickled})
    with pytest.raises(UnreadableError, match="it holds a Tensor in place of a module's text"):
        fedlightning.load(path, trust=True)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    path = exported(tmp_path, lambda own: {"class": "tests.helpers:Toy"})
    with pytest.raises(UnreadableError, match=r"'net\.0\.weight' of Toy, of shape \(5, 6\), has shape \(8, 6\) in it"):
        fedlightning.load(path, Toy(hidden=5))
