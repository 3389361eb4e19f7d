"""Write what follows from the catalogue: the imports of `callbacks/__init__.py` and the README's table of methods.

Run it after a change of the catalogue, or of the list below: ``make registry``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from fedlightning.catalogue import ALGORITHMS, KINDS

ROOT = Path(__file__).resolve().parents[1]
EXPORTS = ROOT / "callbacks" / "__init__.py"
README = ROOT / "README.md"
OTHERS = {
    "GlobalCheckpoint": "checkpoints",
    "PrivateLR": "private_lr",
    "LocalCheckpoint": "checkpoints",
    "PoissonSampling": "poisson",
    "Stragglers": "stragglers",
    "GradientVariance": "diagnostics.gradient_variance",
    "HessianTrace": "diagnostics.hessian_trace",
    "LayerDiagnostics": "diagnostics.layer_diagnostics",
    "LayerValues": "diagnostics.layer_values",
    "FederationSensitivity": "diagnostics.sensitivity",
    "Sensitivity": "diagnostics.sensitivity_terms",
}
"""What `fedlightning.callbacks` exports beside the algorithms: name of the class, module."""
TEMPLATE = '''"""Algorithms, checkpointing and diagnostics: one file per algorithm.

Written by `make registry` from the rows in fedlightning/catalogue. Do not edit it.
"""

{imports}

__all__ = [
{names}
]


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
'''
TABLE = re.compile(r"(<!-- methods: .*? -->\n).*?(<!-- end of methods -->)", re.DOTALL)


def exports() -> str:
    """Return the text of `callbacks/__init__.py`.

    Raises:
        ValueError: If the class of a row is not in the file that the row names.
    """
    modules = defaultdict(list)
    for name, module in (OTHERS | {row.name: row.module for row in ALGORITHMS}).items():
        path = EXPORTS.parent / f"{module.replace('.', '/')}.py"
        if not (path.exists() and re.search(rf"^class {name}\b", path.read_text(), re.MULTILINE)):
            where = path.relative_to(ROOT)
            raise ValueError(f"There is no class {name} in {where}. Name its file in its row: module='...'.")
        modules[module].append(name)
    imports = [_import(f"fedlightning.callbacks.{module}", names) for module, names in sorted(modules.items())]
    names = sorted((name for names in modules.values() for name in names), key=str.casefold)
    return TEMPLATE.format(imports="\n".join(imports), names="\n".join(f'    "{name}",' for name in names))


def _import(module: str, names: list[str]) -> str:
    """Return an import as the formatter writes it: constants, classes, others; wrapped where it is too long."""
    names = sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name.casefold()))
    line = f"from {module} import {', '.join(names)}"
    wrapped = "".join(f"    {name},\n" for name in names)
    return line if len(line) <= 120 else f"from {module} import (\n{wrapped})"


def readme(text: str) -> str:
    """Return the README's text with the table of methods anew.

    Args:
        text: The README as it is.
    """
    lines = [f"| {title} | {', '.join(row.name for row in rows)} |\n" for title, rows in KINDS.items()]
    table = "".join(["| methods | |\n", "|---|---|\n", *lines])
    return TABLE.sub(lambda found: found[1] + table + found[2], text)


def generated() -> dict[Path, str]:
    """Return the files that follow from the catalogue, with the text that they should have."""
    return {EXPORTS: exports(), README: readme(README.read_text())}


def main() -> None:
    """Write the files that are out of date."""
    try:
        files = generated()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for path, text in files.items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"{path.relative_to(ROOT)} is written anew.")


if __name__ == "__main__":
    main()
