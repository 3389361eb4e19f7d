"""One guard for one trap: torchvision's wheel beside a CPU build of torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_DECLARED: list[object] = []  # the operator library: its schemas vanish when it is collected
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def repair_torchvision() -> None:
    """Declare torchvision's missing operator schemas when its compiled extension cannot load.

    The published torchvision wheel is built against CUDA torch. Beside a CPU build its extension does not load, and
    then ``import torchvision`` (and with it ``import lightning``, torchmetrics and timm) dies with "operator
    torchvision::nms does not exist". Declaring the schemas lets the Python part work; calling ``nms`` still raises.
    Nothing is done when torchvision is not installed, is imported already, or its extension loads; a second call does
    nothing. It must run before lightning is imported, and ``import fedlightning`` does so: import fedlightning first.
    """
    if _DECLARED or "torchvision" in sys.modules:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or _extension_loads(list(spec.submodule_search_locations or [])):
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _DECLARED.append(library)


def _extension_loads(folders: list[str]) -> bool:
    """Whether torchvision's operators (``_C.so`` and the like) are in one of the folders and load into this torch."""
    import torch

    for folder in folders:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            extension = Path(folder, f"_C{suffix}")
            if not extension.is_file():
                continue
            try:
                torch.ops.load_library(str(extension))
            except (OSError, ImportError, RuntimeError):
                return False
            return hasattr(torch.ops.torchvision, "nms")
    return False
