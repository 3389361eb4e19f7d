"""Another code under the same names: which files count, and who takes part."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

import pytest

from fedlightning.errors import ConfigurationError
from fedlightning.sites import code_hashes as code
from tests.sites.helpers import SHARES, Line, a_site, at_sites, sites
from tests.sites.test_failures import visits_of

NET = "import torch\nfrom .loss import loss\nclass Net(torch.nn.Module):\n    pass\n"
LOSS = "import {helper}\ndef loss(x):\n    return x\n"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Make a package and a module that it imports, below a folder; return the code of its class."""
    number = iter(range(100))

    def make(place="one", loss=LOSS, name="mine", init="", helper="help_of_mine", end="\n"):
        folder = tmp_path / place
        (folder / name / "deep").mkdir(parents=True, exist_ok=True)
        texts = {
            f"{name}/net.py": NET,
            f"{name}/loss.py": loss.format(helper=helper),
            f"{name}/deep/__init__.py": "x = 1\n",
        }
        texts |= {f"{helper}.py": "y = 2\n"} | ({} if init is None else {f"{name}/__init__.py": init})
        for path, text in texts.items():
            (folder / path).write_bytes(text.replace("\n", end).encode())
        return folder, name, helper

    def found(folder, name, helper):
        for known in [one for one in sys.modules if one.partition(".")[0] in (name, helper)]:
            monkeypatch.delitem(sys.modules, known)
        code._of_package.cache_clear()
        importlib.invalidate_caches()
        with monkeypatch.context() as path:
            path.syspath_prepend(str(folder))
            path.setattr(sys, "dont_write_bytecode", next(number) % 2 == 0)  # files of byte code say nothing
            return code.of_objects([importlib.import_module(f"{name}.net").Net()])

    yield make, found
    code._of_package.cache_clear()


def test_the_same_files_are_the_same_wherever_they_lie_and_however_lines_end(made, tmp_path):
    make, found = made
    one = found(*make())
    assert set(one) == {"mine", "help_of_mine"}
    assert set(one["mine"]) == {
        "__init__.py",
        "net.py",
        "loss.py",
        "deep/__init__.py",
    }
    for other in (found(*make("two")), found(*make("three", end="\r\n"))):
        assert other == one and not code.differences(one, other)
    os.symlink(tmp_path / "two" / "mine", tmp_path / "link")
    folder, name, helper = make("four")
    for path in sorted((folder / name).rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (folder / name).rmdir()
    (folder / name).symlink_to(tmp_path / "link")
    (tmp_path / "two" / "mine" / "deep" / "round").symlink_to(tmp_path / "two" / "mine")
    assert found(folder, name, helper) == one


@pytest.mark.parametrize("init", ["", None], ids=["package", "namespace"])
def test_every_file_of_the_package_counts_and_of_what_it_imports(made, init):
    make, found = made
    one = found(*make(init=init))
    assert code.differences(one, found(*make("two", LOSS.replace("return x", "return -x"), init=init))) == [
        "mine/loss.py"
    ]
    place = make("three", init=init)
    (place[0] / "help_of_mine.py").write_text("y = 3\n")
    assert code.differences(one, found(*place)) == ["help_of_mine.py"]
    if init is not None:
        place = make("four", init=init)
        (place[0] / "mine" / "loss").mkdir()  # a package is found before a file of its name
        (place[0] / "mine" / "loss" / "__init__.py").write_text("loss = None\n")
        assert code.differences(one, found(*place)) == [
            "help_of_mine (files there, nothing here)",
            "mine/loss/__init__.py",
        ]


def test_a_script_counts_and_a_notebook_is_not_seen(monkeypatch, tmp_path):
    class Net:
        __module__ = "__main__"

    def told(file):
        script = ModuleType("__main__")
        if file is not None:
            script.__file__ = str(file)
        monkeypatch.setitem(sys.modules, "__main__", script)
        code._of_package.cache_clear()
        return code.of_objects([Net()])

    for name, text in (("a.py", "x"), ("b.py", "x"), ("c.py", "y")):
        (tmp_path / name).write_text(text)
    a, b, c, notebook = (told(name and tmp_path / name) for name in ("a.py", "b.py", "c.py", None))
    code._of_package.cache_clear()
    assert a == b and code.differences(a, c) == ["__main__/the script"]
    assert code.differences(notebook, notebook) == ["__main__/code"]  # nobody knows whether it is the same


def test_installed_packages_are_told_by_version_and_large_ones_by_one_hash():
    import torch
    import yaml

    assert code.of_objects([yaml.YAMLError(), torch.nn.Linear(1, 1), 3, "text"]) == {
        "yaml": {"": code._version("yaml")}
    }
    assert code._version("yaml")[0].isdigit()
    (files,) = code.of_objects([code.of_objects])["fedlightning"]
    assert files.endswith(" files")


OTHER = {"mine": {"net.py": "1", "loss.py": "2"}}


def with_code(line_of, number, found, **given):
    site = a_site(line_of / str(number), SHARES[number], **given)
    site._code = site._code | found
    return site


def test_other_code_is_refused_and_both_sides_can_allow_it(tmp_path, monkeypatch):
    monkeypatch.setattr(code, "of_blueprint", lambda blueprint: OTHER)
    line = Line(sites(tmp_path / "sites"))
    site = with_code(tmp_path / "sites", 1, {"mine": OTHER["mine"] | {"loss.py": "3"}})
    line.sites["1"] = site.answer
    with pytest.raises(ConfigurationError, match=r"that of site .home of site1.: mine/loss.py. Install.*other_code"):
        at_sites(line, tmp_path / "server")
    site._allow_other_code = True
    with pytest.raises(
        ConfigurationError, match=r"has other code than the server \(mine/loss.py\): start the server with"
    ):
        at_sites(line, tmp_path / "server")
    with pytest.warns(UserWarning, match=r"site1. has other code than the server \(mine/loss.py\), which is allowed"):
        at_sites(line, tmp_path / "server", allow_other_code=True)


@pytest.mark.parametrize("what", ["_code", "_data_code"])
def test_a_site_that_comes_back_with_other_code_takes_no_part(tmp_path, what):
    line, begun = Line(sites(tmp_path / "sites")), []

    def change(node, data):
        if node == "1" and visits_of(data, 1) and not begun:
            site = a_site(tmp_path / "sites" / "1", SHARES[1])
            setattr(site, what, {"mine": {"loss.py": "3"}} if what == "_code" else "another")
            begun.append(node)
            line.sites[node] = site.answer
        return data

    line.watch = change
    with pytest.warns(
        UserWarning, match="code is not that of site" if what == "_code" else "or with other code of its data"
    ):
        run = at_sites(line, tmp_path / "server")
    left_out = {(entry["round"], entry["client"]) for entry in run.server.failures if entry["where"] == "training"}
    assert begun and left_out == {(2, "site1"), (2, "site2")}
