"""The guard around torchvision, each time in a process of its own."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers import mostly_slow

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is an extra"
)

EXTENSION = """
import torch
{load}
"""
"""`torchvision.extension`: here an extension is a function of Python that registers what the compiled one registers."""
META = """
import torch
from torchvision import extension

@torch.library.register_fake("torchvision::nms")
def meta_nms(dets, scores, iou_threshold): ...
"""
REGISTERS = """
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.impl("nms", lambda dets, scores, iou_threshold: scores, "CPU")
"""
FAILS = "failed = OSError('libcudart.so: cannot open shared object file')"


def run(code: str, path: Path | str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def make_package(tmp_path):
    """Write a package `torchvision` that registers its operators as the real one does."""

    def make(load: str, *binaries: str, init: str = "from torchvision import _meta_registrations") -> Path:
        folder = tmp_path / "torchvision"
        folder.mkdir()
        (folder / "__init__.py").write_text(init)
        (folder / "extension.py").write_text(EXTENSION.format(load=load))
        (folder / "_meta_registrations.py").write_text(META)
        for name in binaries:  # the guard must not go by these
            (folder / name).write_bytes(b"no library")
        return tmp_path

    return make


REPORT = """
import fedlightning, sys, torchvision
from fedlightning.compat.torchvision import _DECLARED
import torch
print(len(_DECLARED), hasattr(torch.ops.torchvision, "nms"), "library" in vars(torchvision.extension))
"""


@pytest.mark.parametrize("binary", mostly_slow(["_C.so", "_C_stable.so", "_C.abi3.so"], ("_C_stable.so",)))
def test_operators_of_an_extension_that_loads_are_never_declared(make_package, binary):
    assert run(REPORT, make_package(REGISTERS, binary)) == "0 True True"


@pytest.mark.parametrize("binaries", mostly_slow([[], ["_C.so"], ["_C_stable.so"]], [[]]))
def test_operators_of_an_extension_that_does_not_load_are_declared(make_package, binaries):
    """And it is not loaded again: where it loads the second time, a second registration would end the process."""
    assert run(REPORT, make_package(f"{FAILS}\nprint('tried')", *binaries)).split() == ["tried", "1", "True", "False"]


@pytest.mark.parametrize("error", ["RuntimeError('built for another torch')", "ImportError('no PIL')"])
def test_other_errors_of_torchvision_stay_as_they_are(make_package, error):
    code = f"""
        import fedlightning
        from fedlightning.compat.torchvision import _DECLARED
        try:
            import torchvision
        except ({error.partition("(")[0]}) as raised:
            print(raised, len(_DECLARED))
    """
    path = make_package(FAILS, init=f"raise {error}")
    assert run(code, path) == f"{error.partition(chr(39))[2][:-2]} 0"


def test_nothing_happens_without_torchvision_or_after_it():
    run("""
        import importlib.util, sys, types
        import fedlightning
        assert "torch" not in sys.modules, "whoever imports fedlightning alone does not pay for torch"
        from fedlightning.compat.torchvision import TorchvisionFinder, repair_torchvision_when_imported
        finder, = [item for item in sys.meta_path if isinstance(item, TorchvisionFinder)]
        repair_torchvision_when_imported()
        assert sum(isinstance(item, TorchvisionFinder) for item in sys.meta_path) == 1
        sys.meta_path[:] = [finder]
        assert finder.find_spec("torchvision", None) is None and finder.find_spec("timm", None) is None
        sys.meta_path.clear()
        sys.modules["torchvision"] = types.ModuleType("torchvision")  # as if imported already
        repair_torchvision_when_imported()
        assert not sys.meta_path
    """)


@needs_torchvision
@pytest.mark.slow
def test_lightning_torchvision_and_timm_work_after_fedlightning():
    output = run("""
        import fedlightning
        import lightning, torch, torchvision, inspect, importlib.util
        from fedlightning.compat.torchvision import _DECLARED
        torch.set_num_threads(1)
        if importlib.util.find_spec("timm"):
            import timm
        assert "datasets" in inspect.getsource(torchvision)
        net = torchvision.models.resnet18(num_classes=3)
        net(torch.randn(2, 3, 32, 32)).sum().backward()
        assert net.fc.weight.grad is not None
        try:
            torchvision.ops.nms(torch.rand(2, 4), torch.rand(2), 0.5)
        except (RuntimeError, NotImplementedError):
            print("refused")
        else:
            assert not _DECLARED, "a declared operator must not answer"
            print("works")
    """)
    assert output in ("refused", "works")


@needs_torchvision
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_imports_work_in_any_order():
    """Behind `import fedlightning` in every environment; before it where the builds of torch and torchvision match."""
    names = ("fedlightning", "lightning", "torchvision", "timm", "torchmetrics")
    names = tuple(name for name in names if importlib.util.find_spec(name))
    alone = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False)
    for order in itertools.permutations(names, 3):
        if alone.returncode == 0 or order[0] == "fedlightning":
            rest = [name for name in names if name not in order]
            run("; ".join(f"import {name}" for name in [*order, *rest]) + "; from fedlightning import FederatedTrainer")
