"""Write what follows from the catalogue: the stub of `callbacks/` and the README's table of methods.

Run it after a change of the catalogue, or of the list below: ``make registry``.
"""

from __future__ import annotations

import re
from pathlib import Path

from fedlightning.catalogue import ALGORITHMS, KINDS

ROOT = Path(__file__).resolve().parents[1]
CALLBACKS = ROOT / "callbacks"
EXPORTS = CALLBACKS / "__init__.pyi"
README = ROOT / "README.md"
OTHERS = (
    "GlobalCheckpoint",
    "FederatedEarlyStopping",
    "Budget",
    "ClientDP",
    "SampleDP",
    "SecureAggregation",
    "TopK",
    "RandomK",
    "QSGD",
    "NormClippedMean",
    "CoordinateMedian",
    "TrimmedMean",
    "Krum",
    "GeometricMedian",
    "CenteredClipping",
    "FLTrust",
    "PrivateLR",
    "LocalCheckpoint",
    "PoissonSampling",
    "TokenWeighting",
    "Stragglers",
    "GradientVariance",
    "HessianTrace",
    "LayerDiagnostics",
    "LayerValues",
    "FederationSensitivity",
    "Sensitivity",
)
"""What `fedlightning.callbacks` exports beside the algorithms."""
TEMPLATE = '''"""Algorithms, checkpointing and diagnostics: one file per algorithm.

Written by `make registry` from the rows in fedlightning/catalogue. Do not edit it.
"""

{imports}

__all__: list[str]

def __dir__() -> list[str]: ...
'''
TABLE = re.compile(r"(<!-- methods: .*? -->\n).*?(<!-- end of methods -->)", re.DOTALL)


def exports() -> str:
    """Return the text of `callbacks/__init__.pyi`: each public class with the module that defines it.

    Raises:
        ValueError: If no file defines the class of a row, or several do.
    """
    wanted = {*OTHERS, *(row.name for row in ALGORITHMS)}
    places: dict[str, list[str]] = {name: [] for name in wanted}
    for path in sorted(CALLBACKS.rglob("*.py")):
        module = ".".join(("fedlightning", *path.relative_to(ROOT).with_suffix("").parts))
        for name in wanted.intersection(re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)):
            places[name].append(module)
    wrong = next((name for name, found in places.items() if len(found) != 1), None)
    if wrong is not None:
        raise ValueError(f"{' and '.join(places[wrong]) or 'No file in callbacks/'} defines a class {wrong}.")
    found = sorted((module, not name.isupper(), name.casefold(), name) for name, (module,) in places.items())
    return TEMPLATE.format(imports="\n".join(f"from {module} import {name} as {name}" for module, *_, name in found))


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
