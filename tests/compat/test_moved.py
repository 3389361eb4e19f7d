"""Old import paths find the present objects, and say where they are now."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import warnings

import pytest

from fedlightning.compat.moved import MOVED, NAMES, new_path


@pytest.mark.parametrize("old", MOVED)
def test_an_old_module_answers_with_what_the_new_one_holds(old):
    sys.modules.pop(f"fedlightning.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"fedlightning\.{old} is fedlightning\.{MOVED[old]} now"):
        before = importlib.import_module(f"fedlightning.{old}")
    now = importlib.import_module(f"fedlightning.{MOVED[old]}")
    for name, value in vars(now).items():
        if not name.startswith("__") and getattr(value, "__module__", None) == now.__name__:
            assert getattr(before, name) is value
    with pytest.raises(AttributeError):
        before.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_a_name_that_went_elsewhere_is_found(module, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = getattr(importlib.import_module(f"fedlightning.{module}"), name)
    assert found is getattr(importlib.import_module(f"fedlightning.{NAMES[module][name]}"), name)


def test_submodules_of_a_package_that_moved():
    assert new_path("fedlightning.evaluation.report.build") == "fedlightning.study.report.build"
    from fedlightning.study.report.build import build_report

    with pytest.warns(DeprecationWarning):
        from fedlightning.evaluation.report.build import build_report as before
    assert before is build_report


def test_a_pickle_of_an_earlier_version_opens():
    sys.modules.pop("fedlightning.client", None)
    with pytest.warns(DeprecationWarning):
        found = pickle.loads(b"cfedlightning.client\nClientRecord\n.")
    assert found.__module__ == "fedlightning.visit.record"


@pytest.mark.slow
def test_our_own_imports_warn_of_nothing():
    modules = ("trainer", "callbacks", "cli", "commands.run", "study.study", "testing", "engines.worker")
    code = "; ".join(f"import fedlightning.{module}" for module in modules)
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning:fedlightning", "-c", code], check=True)
