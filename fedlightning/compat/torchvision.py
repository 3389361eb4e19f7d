"""One guard for one trap: torchvision's wheel beside a build of torch that its extension does not load into."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_DECLARED: list[object] = []  # the operator library: its schemas vanish when it is collected
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class TorchvisionFinder(MetaPathFinder):
    """Finds torchvision as the other finders do; where its import fails for want of its operators, it is tried again.

    The published torchvision wheel is built against CUDA torch. Beside a CPU build its extension does not load, and
    then `import torchvision` (and with it `import lightning`, torchmetrics and timm) dies with "operator
    torchvision::nms does not exist". With the schemas declared the Python part works; calling `nms` still raises.

    What decides is the error, not what files there are: torchvision has tried to load its extension by then, and does not
    try again, so an operator that is declared here can never be registered a second time, which would end the process.
    It must be there before torchvision is imported, and `import fedlightning` takes care of that.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of `torchvision` with a second try, `None` for all other modules."""
        if fullname != "torchvision":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = copy.copy(spec.loader)
                    spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
                return spec
        return None


def repair_torchvision_when_imported() -> None:
    """Install :class:`TorchvisionFinder`, once; without effect where torchvision is imported already."""
    if "torchvision" not in sys.modules and not any(isinstance(item, TorchvisionFinder) for item in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run torchvision's `__init__`; a second time, with its operators declared, if the first says they do not exist."""
    try:
        execute(module)
    except RuntimeError as error:
        if "operator torchvision::" not in str(error) or _DECLARED:
            raise
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(schema)
        _DECLARED.append(library)
        execute(module)
