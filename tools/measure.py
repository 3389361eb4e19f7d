"""Count what a reader has to hold: lines, refusals, names of the contract, and the files that one round passes through.

    python -m tools.measure            numbers of this checkout
    python -m tools.measure --files    and the files of the traced round, in the order in which they are entered

A line of code is a line that is neither empty, nor a comment, nor part of a docstring.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fedlightning", "callbacks", "datamodules")
QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
LONG = 350


def sources() -> list[Path]:
    """Return the files of the product. Folders that are links to others are counted once."""
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted({path.resolve() for path in found})


def lines_of(path: Path) -> tuple[int, int]:
    """Return a file's lines of code, and those of its docstrings."""
    text = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    coded: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in QUIET and token.type != tokenize.ENDMARKER:
            coded |= set(range(token.start[0], token.end[0] + 1))
    return len(coded - documented), len(documented)


def raises_of(path: Path) -> Iterator[tuple[bool, bool]]:
    """Yield for every `raise` whether it refuses an argument, and whether it refuses another callback.

    The first are those of constructors, the second those of `callbacks/` where a function goes through the other
    callbacks, or is given one of them.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ours = "callbacks" in path.relative_to(ROOT).parts
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inner = {
        id(node): function for function in functions for node in ast.walk(function)
    }  # the innermost one comes last
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise):
            continue
        function = inner.get(id(node))
        about = function is not None and function.name in ("__init__", "__post_init__")
        pair = ours and function is not None and not about and _sees_others(function) and _names_other(node)
        yield about, pair


def _sees_others(function: ast.FunctionDef) -> bool:
    """Return whether a function goes through `setup.callbacks`, or is given another callback."""
    attributes = (node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute))
    return "callbacks" in attributes or any(argument.arg == "other" for argument in function.args.args)


def _names_other(node: ast.Raise) -> bool:
    """Return whether a sentence names another callback: `other.key`, a list of keys, or one by its class's name."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    text = " ".join(str(one.value) for one in ast.walk(node) if isinstance(one, ast.Constant))
    return bool(names & {"other", "others", "anchored", "merging", "fits", "wrapping"}) or "Checkpoint" in text


def contract() -> dict[str, list[str]]:
    """Return the methods, the class attributes and the names that an author of an algorithm meets."""
    import fedlightning.algorithm as algorithm
    from fedlightning.algorithm import FederatedCallback

    given = {"client", "hyperparameters", "key", "claims"}
    own = {name: value for name, value in vars(FederatedCallback).items() if not name.startswith("_")}
    return {
        "methods": [name for name, value in own.items() if inspect.isfunction(value) and name not in given],
        "attributes": [name for name in inspect.get_annotations(FederatedCallback) if not name.startswith("_")],
        "names": list(algorithm.__all__),
    }


def traced_round() -> tuple[list[str], list[str]]:
    """Return the files that a run of one round and two clients enters before its round, and in it.

    What a file does when it is imported does not count.
    """
    import torch
    from lightning.pytorch import LightningModule
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from fedlightning import FederatedTrainer
    from fedlightning.callbacks import FedAvg
    from fedlightning.server.federation import Federation

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        validation_step = test_step = training_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def data(seed: int) -> TensorDataset:
        draw = torch.Generator().manual_seed(seed)
        return TensorDataset(torch.randn(8, 4, generator=draw), torch.randint(0, 2, (8,), generator=draw))

    def loaders() -> dict[str, DataLoader[Any]]:
        return {"a": DataLoader(data(1), batch_size=4), "b": DataLoader(data(2), batch_size=4)}

    entered: dict[str, list[str]] = {"before": [], "round": [], "after": []}
    now = ["before"]

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name not in ("<module>", "<lambda>"):
            name = frame.f_code.co_filename
            if name.startswith(prefixes) and name not in entered[now[0]]:
                entered[now[0]].append(name)

    prefixes = tuple(str(ROOT / package) for package in PACKAGES)
    carry_out = Federation.round

    def marked(self: Federation, *args: Any) -> Any:
        now[0] = "round"
        try:
            return carry_out(self, *args)
        finally:
            now[0] = "after"

    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(callbacks=[FedAvg()], max_rounds=1, default_root_dir=folder)
        Federation.round = marked  # type: ignore[method-assign]
        sys.setprofile(profile)
        try:
            trainer.fit(Model(), train_dataloaders=loaders(), val_dataloaders=loaders())
        finally:
            sys.setprofile(None)
            Federation.round = carry_out  # type: ignore[method-assign]
    return [str(Path(name).relative_to(ROOT)) for name in entered["before"]], [
        str(Path(name).relative_to(ROOT)) for name in entered["round"]
    ]


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--files", action="store_true", help="list the files of the traced round")
    args = parser.parse_args()
    counted = {path: lines_of(path) for path in sources()}
    refusals = [found for path in counted for found in raises_of(path)]
    words, (before, during) = contract(), traced_round()
    rows = {
        "files": len(counted),
        "lines of code": sum(code for code, _ in counted.values()),
        "lines of docstrings": sum(documented for _, documented in counted.values()),
        f"files of more than {LONG} lines": sum(len(path.read_text().splitlines()) > LONG for path in counted),
        "raises": len(refusals),
        "raises about arguments": sum(about for about, _ in refusals),
        "raises about another callback": sum(pair for _, pair in refusals),
        "methods that an author may override": len(words["methods"]),
        "class attributes of the base": len(words["attributes"]),
        "names in fedlightning.algorithm": len(words["names"]),
        "files entered before round 1": len(before),
        "files entered in one round": len(during),
    }
    for what, number in rows.items():
        print(f"{number:7d}  {what}")
    if args.files:
        print("\nBefore round 1:", *before, "\nIn the round:", *during, sep="\n  ")


if __name__ == "__main__":
    main()
