"""Pages that follow from the code: a page a method, the API, the commands, the keys of a configuration."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diagrams
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from fedlightning import FederatedTrainer
from fedlightning.catalogue import ALGORITHMS, FAMILIES, KINDS, Algorithm
from fedlightning.client.data_summary import DataSummary
from fedlightning.commands import COMMANDS, json_output
from fedlightning.contract import ROLES, FederatedCallback, families
from fedlightning.sites.agreement import LEAVES
from tools.methods_table import lines_on

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
MODULES = {
    "fedlightning": "What most programs import.",
    "fedlightning.algorithm": "The contract that an algorithm is written to.",
    "fedlightning.callbacks": "Checkpoints, privacy, selection and diagnostics. Algorithms have "
    ":doc:`pages of their own </reference/methods/index>`.",
    "fedlightning.callbacks.shared": "Pieces that methods share, for authors of methods.",
    "fedlightning.datamodules": "Who has which samples.",
    "fedlightning.models": "Reference networks, and modules for classification, regression and survival.",
    "fedlightning.wrappers": "Changes of somebody else's module.",
    "fedlightning.layers": "A module as a list of layers.",
    "fedlightning.topology": "Graphs of clients without a server.",
    "fedlightning.virtual_time": "Virtual time: speeds, links and availability of clients.",
    "fedlightning.server.loop": "When clients are visited, and what a round is.",
    "fedlightning.catalogue": "The registry of algorithms.",
    "fedlightning.wire": "The bytes of a message.",
    "fedlightning.testing": "Checks for an algorithm of your own.",
}
"""Public module -> what it is for. Each name in its `__all__` has a page."""
SETTINGS = ("DataModule", "Partitioner", "Partitioned")
"""Ends of the names of classes whose arguments are keys of the `data` section."""


def plain(text: str) -> str:
    """Return a text in which nothing is markup but code in backticks."""
    parts = re.split(r"(`+[^`]+`+)", " ".join(text.split()))
    return "".join(
        f"``{part.strip('`')}``" if n % 2 else re.sub(r"([\\*`|_<>])", r"\\\1", part) for n, part in enumerate(parts)
    )


def titled(text: str, line: str = "=") -> str:
    """Return a heading."""
    return f"{text}\n{line * len(text)}\n\n"


def table(rows: list[tuple[str, ...]], header: tuple[str, ...] = (), widths: str = "auto") -> str:
    """Return a list-table; cells are reStructuredText."""
    text = f".. list-table::\n   :header-rows: {int(bool(header))}\n   :widths: {widths}\n\n"
    for row in [header, *rows] if header else rows:
        text += "".join(f"   {'*' if not n else ' '} - {cell}\n" for n, cell in enumerate(row))
    return text + "\n"


def code(text: str, language: str = "text") -> str:
    """Return a block of code."""
    return f".. code-block:: {language}\n\n" + "".join(f"   {line}\n" for line in text.splitlines()) + "\n"


def svg(text: str) -> str:
    """Return a drawing as a part of the page."""
    return f'.. raw:: html\n\n   <div class="flow-box">{text.strip()}</div>\n\n'


def definitions(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return a list of terms, each with remarks beside it and a text below: narrow pages have no room for tables."""
    return "".join(f"``{term}`` : {remarks}\n   {text or '..'}\n\n" for term, remarks, text in rows)


def arguments_of(row: Algorithm, with_types: bool = False) -> str:
    """Return the arguments of a class as a list: name, default, what it may be, and what it means."""
    found = []
    for one in row.options():
        if one.name in ("args", "kwargs"):
            continue
        remarks = "required" if one.default == "required" else f"default ``{one.default}``"
        kind = one.values or (one.type if with_types else "")
        found.append((one.name, f"{remarks}; {plain(kind)}" if kind else remarks, plain(one.help)))
    return definitions(found)


@functools.cache
def names_in_files() -> dict[Path, set[str]]:
    """Return the names of classes in each configuration and example, those first that say least beside them."""
    files = [*sorted((ROOT / "configs").rglob("*.yaml")), *sorted((ROOT / "examples").glob("**/*.py"))]
    files = [path for path in files if path.parent.name != "tutorials"]  # these have galleries
    words = {".yaml": r"class_path: *[\"']?(?:\w+\.)*(\w+)", ".py": r"\b([A-Z]\w+)"}
    names = {path: set(re.findall(words[path.suffix], path.read_text())) for path in files}
    return dict(sorted(names.items(), key=lambda item: len(item[1])))


def used_in(name: str, without: str = "", most: int = 8) -> str:
    """Return a list of the configurations and examples that use a class, each to be downloaded."""
    lines = []
    for path, names in names_in_files().items():
        relative = path.relative_to(ROOT).as_posix()
        if name in names and relative != without:
            first = path.read_text().lstrip('"#! ').partition("\n")[0]
            lines.append(f"- :download:`{relative} </../{relative}>`: {plain(first)}\n")
    return titled("Used in", "-") + "".join(lines[:most]) + "\n" if lines else ""


def write(path: Path, text: str) -> None:
    """Write a page, unless it is there already: what is older than its page is not read again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


# -- methods -----------------------------------------------------------------------------------------------------------
def method_page(row: Algorithm, measured: dict[str, dict[str, list[str]]]) -> str:
    """Return the page of a method."""
    no_server = row in KINDS["no server: neighbours' models"]
    text = titled(row.name) + f"{plain(row.sentence)}\n\n*{plain(row.paper)}*\n\n"
    text += svg(
        diagrams.of_method(row.name, row.down, row.up, row.leaves, row.client_state, row.server_state, no_server)
    )
    facts = [
        ("Family", FAMILIES[row.family]),
        ("The server keeps of each client", row.of_clients),
        ("Deployed", row.deployed),
        ("Weights of clients", row.weights),
        ("Composes with", row.composes),
    ]
    text += table([(name, plain(value)) for name, value in facts if value], widths="25 75")
    text += titled("Use it", "-")
    text += code((ROOT / row.config).read_text(), "yaml")
    text += code(f"fedlightning fit --config configs/quickstart.yaml --config {row.config}", "bash")
    options = arguments_of(row)
    if options:
        text += titled("Options", "-") + options
    lines = [(data, *map(plain, found[row.name][:4])) for data, found in measured.items() if row.name in found]
    if lines:
        text += titled("Measured", "-")
        text += "At its defaults in short runs (:doc:`what was run </results/methods>`); these show that it works, not "
        text += "which method is best.\n\n" + table(lines, ("data", "accuracy", "worst client", "MB sent", "seconds"))
    text += titled("In words, and as code", "-")
    text += f".. autoclass:: {row.class_path}\n   :members:\n   :show-inheritance:\n\n"
    file = inspect.getsourcefile(row.load())
    path = os.path.relpath(Path(file or "").resolve(), REFERENCE / "methods")
    text += f".. dropdown:: The class in full\n\n   .. literalinclude:: {path}\n      :pyobject: {row.name}\n\n"
    text += used_in(row.name, without=row.config)
    return text + f".. minigallery:: {row.class_path}\n   :add-heading: Tutorials\n"


def methods() -> None:
    """Write a page for each method, and one that lists them."""
    measured = lines_on((ROOT / "docs/results/methods.md").read_text())
    index = titled("Methods") + (
        "Each page is written from the method's row in the catalogue, its docstring and its YAML file. Which one to take "
        "is on :doc:`/choose`.\n\n"
    )
    for kind, rows in KINDS.items():
        index += titled(kind[0].upper() + kind[1:], "-")
        index += table(
            [(f":doc:`{row.name} <{row.name.lower()}>`", plain(row.sentence)) for row in rows], widths="20 80"
        )
        index += ".. toctree::\n   :hidden:\n\n" + "".join(f"   {row.name.lower()}\n" for row in rows) + "\n"
    write(REFERENCE / "methods" / "index.rst", index)
    for row in ALGORITHMS:
        write(REFERENCE / "methods" / f"{row.name.lower()}.rst", method_page(row, measured))


# -- the API -----------------------------------------------------------------------------------------------------------
def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, as reStructuredText."""
    paragraph = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[^.][.:]) ", paragraph)[0]
    return sentence if sentence.count("`") % 2 == 0 else paragraph


def words_of_value(module: str, name: str) -> str:
    """Return what stands below the assignment of a public constant or type, wherever that is."""
    value = getattr(importlib.import_module(module), name)
    folder = Path(importlib.import_module("fedlightning").__file__ or "").parent
    for path in sorted(folder.glob("**/*.py")):
        if re.search(rf"^{name}\b.* = ", path.read_text(), re.MULTILINE):
            found = ".".join(("fedlightning", *path.relative_to(folder).with_suffix("").parts))
            documented = ModuleAnalyzer.for_module(found.removesuffix(".__init__")).find_attr_docs()
            if ("", name) in documented:
                return " ".join(" ".join(documented["", name]).split())
    return f"``{type(value).__name__}``"


def object_page(module: str, name: str, again: bool) -> tuple[str, str]:
    """Return the page of a public name, and what it is in a sentence; `again`: another module has shown it already."""
    value = getattr(importlib.import_module(module), name)
    full = f"{module}.{name}"
    heading = f".. currentmodule:: {module}\n\n" + titled(name)
    no_index = "   :no-index:\n" * again
    if inspect.isclass(value):
        body = f".. autoclass:: {full}\n   :members:\n   :show-inheritance:\n{no_index}\n{used_in(name)}"
    elif inspect.isfunction(value):
        body = f".. autofunction:: {full}\n{no_index}"
    elif inspect.ismodule(value):
        return heading + f".. automodule:: {value.__name__}\n   :members:\n   :noindex:\n", first_sentence(
            value.__doc__ or ""
        )
    else:
        words = words_of_value(module, name)
        return heading + f".. py:data:: {full}\n\n   {words}\n", first_sentence(words)
    return heading + body + f"\n.. minigallery:: {full}\n   :add-heading: Tutorials\n", first_sentence(
        value.__doc__ or ""
    )


def api() -> None:
    """Write a page for each public name, one for each public module, and one that lists these."""
    folder, methods, shown = REFERENCE / "api", {row.name for row in ALGORITHMS}, set[int]()
    index = titled("Python") + ".. toctree::\n   :maxdepth: 1\n\n"
    for module, purpose in MODULES.items():
        short = module.removeprefix("fedlightning.").replace(".", "_")
        index += f"   {short}/index\n"
        rows, pages = [], []
        for name in sorted(set(importlib.import_module(module).__all__) - methods, key=str.casefold):
            value = id(getattr(importlib.import_module(module), name))
            page, sentence = object_page(module, name, value in shown)
            shown.add(value)
            write(folder / short / f"{name}.rst", page)
            rows.append((f":doc:`{name}`", sentence or ".."))
            pages.append(f"   {name}\n")
        text = titled(module) + f"{purpose}\n\n" + table(rows, widths="30 70")
        write(folder / short / "index.rst", text + ".. toctree::\n   :hidden:\n\n" + "".join(pages))
    write(folder / "index.rst", index)


def bases() -> list[type]:
    """Return the base of all callbacks, then those of its kinds."""
    kinds = [
        value for value in vars(families).values() if inspect.isclass(value) and value.__module__ == families.__name__
    ]
    return [FederatedCallback, *kinds]


def hooks() -> None:
    """Write a page with every hook: those of all callbacks, then those that one kind of callbacks has."""
    text = titled("Hooks") + (
        "Every method that a callback may override. A *role* belongs to one callback; all others run for every callback. The "
        "nine of the contract, with what they may change, are on :doc:`/how-to/write_an_algorithm`. A method of a kind needs "
        "the base class of that kind.\n\n"
    )
    for base in bases():
        named = [name for name, value in vars(base).items() if inspect.isfunction(value) and name[0] != "_"]
        named = [name for name in named if name not in ("hyperparameters", "facts")]
        text += titled(base.__name__, "-") + f"{inspect.cleandoc(base.__doc__ or '').partition(chr(10) * 2)[0]}\n\n"
        text += definitions(
            (
                f"{name}({', '.join(list(inspect.signature(getattr(base, name)).parameters)[1:])})",
                "role" if name in ROLES else "event",
                " ".join(inspect.cleandoc(getattr(base, name).__doc__ or "").partition("\n\nArgs:")[0].split()),
            )
            for name in named
        )
    write(REFERENCE / "hooks.rst", text)


# -- commands and keys -------------------------------------------------------------------------------------------------
def help_of(command: str) -> str:
    """Return what `fedlightning COMMAND --help` prints, or the help of `fedlightning` itself for an empty name."""
    from fedlightning.cli import main

    printed = io.StringIO()
    os.environ["COLUMNS"] = "96"
    with contextlib.redirect_stdout(printed):
        main([command, "--help"] if command else ["--help"])
    return printed.getvalue()


def commands() -> None:
    """Write a page with the help of every command."""
    text = titled("Command line") + "What each command prints with ``--help``.\n\n" + code(help_of(""))
    for command in COMMANDS:
        text += (
            f".. _command-{command}:\n\n" + titled(command, "-") + f"{COMMANDS[command]}\n\n" + code(help_of(command))
        )
    write(REFERENCE / "commands.rst", text)


def json_lines() -> None:
    """Write a page with the fields that commands print for programs."""
    text = titled("JSON of commands") + inspect.cleandoc(json_output.__doc__ or "") + "\n\n"
    for command, fields in json_output.FIELDS.items():
        text += titled(command, "-") + table(
            [(f"``{name}``", plain(words)) for name, words in fields.items()], widths="25 75"
        )
    write(REFERENCE / "json.rst", text)


def keys_of(cls: type) -> str:
    """Return the arguments of a class that is not an algorithm."""
    return arguments_of(Algorithm(cls.__name__, "other", "", "", class_path=f"{cls.__module__}.{cls.__name__}"), True)


def configuration() -> None:
    """Write a page with the keys of the sections `trainer` and `data`, and of the modules that come with the package."""
    import fedlightning.datamodules as data
    import fedlightning.models as models

    text = titled("Configuration keys") + (
        "A configuration has the sections ``trainer``, ``model`` and ``data``. The same as a JSON Schema, "
        "which editors read: ``fedlightning configs schema``. Algorithms and their keys: :doc:`methods/index`.\n\n"
    )
    text += titled("trainer", "-") + keys_of(FederatedTrainer)
    chosen: dict[str, list[Any]] = {
        "data": [
            value for name in data.__all__ if name.endswith(SETTINGS) and inspect.isclass(value := getattr(data, name))
        ],
        "model": [models.Classifier, models.Regressor, models.CoxRegressor, models.ClientModels],
    }
    for section, classes in chosen.items():
        text += titled(section, "-")
        for cls in classes:
            rows = keys_of(cls)
            if rows:
                text += titled(cls.__name__, "~") + rows
    write(REFERENCE / "configuration_keys.rst", text)


def datasets() -> None:
    """Write a page with the data modules: what each holds, and the configurations that load it."""
    import fedlightning.datamodules as data

    files = {path: path.read_text() for path in sorted((ROOT / "configs/data").glob("*.yaml"))}
    rows = []
    for name in data.__all__:
        if name.endswith(("DataModule", "Partitioned")) and inspect.isclass(value := getattr(data, name)):
            found = [f"``{path.relative_to(ROOT)}``" for path, text in files.items() if f".{name}\n" in text]
            summary = inspect.cleandoc(value.__doc__ or "").split("\n\n")[0]
            rows.append((f":class:`~fedlightning.datamodules.{name}`", plain(summary), ", ".join(found)))
    text = titled("Data sets") + (
        "The data modules that come with the package. The page of each says who the clients are, where the files are "
        "had and under which terms, and what is published of their split. Nothing is downloaded unasked.\n\n"
    )
    write(REFERENCE / "datasets.rst", text + table(rows, ("class", "data", "configuration"), "25 50 25"))


ANSWER = {
    "name": "Name of the site (``--name``).",
    "clients": "Names of all clients that are here.",
    "versions": "Versions of torch and Lightning.",
    "time": "Its clock.",
    "other_code": "With ``--allow_other_code true``: names of files that differ from the server's, else nothing.",
}
"""What a site says of itself beside the description of its data."""


def greeting() -> None:
    """Write a page with what a site tells before round 1, from the declaration that it is held to."""
    described = inspect.cleandoc(DataSummary.__doc__ or "").partition("Attributes:")[2]
    words = {name: plain(text) for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {6,}.*)*)", described, re.MULTILINE)}
    rows = [(f"``{name}``", leaves, ANSWER.get(name) or words[name]) for name, leaves in LEAVES.items()]
    text = titled("What a site tells before round 1") + (
        "A site tells what leaves as it is, whatever the server asks for, when it joins and when it comes back. *Keyed* is a "
        "hash with a key that only the site has; *with public data*: where the server has them too, to be compared.\n\n"
    )
    write(REFERENCE / "greeting.rst", text + table(rows, ("field", "leaves", "what it is"), "18 17 65"))


def generate(app: Sphinx) -> None:
    """Write all pages before the sources are read."""
    methods()
    api()
    commands()
    configuration()
    datasets()
    greeting()
    json_lines()
    hooks()
    write(ROOT / "docs/_static/flow.css", diagrams.STYLE.replace("#1f2328", "inherit"))


def without_types(app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, returns: str) -> Any:
    """Return the signature of a class without types: its arguments are described below it, and ranges would fill lines."""
    if what != "class" or not signature:
        return None
    arguments = inspect.signature(value).parameters.values()
    plain_ones = [one.replace(annotation=inspect.Parameter.empty) for one in arguments]
    return str(inspect.Signature(plain_ones)), returns


@functools.cache
def pages_of_classes() -> dict[str, str]:
    """Return the page of each method and public class by its name."""
    pages = {}
    for module in reversed(MODULES):  # a name that several modules have is shown by the first
        short, package = module.removeprefix("fedlightning.").replace(".", "_"), importlib.import_module(module)
        names = (name for name in package.__all__ if inspect.isclass(getattr(package, name)))
        pages |= {name: f"reference/api/{short}/{name}" for name in names}
    return pages | {row.name: f"reference/methods/{row.name.lower()}" for row in ALGORITHMS}


def link_pages(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Let the name of a method or class that stands alone as code, and a tutorial's file, lead to its page."""
    for file in list(tree.findall(addnodes.download_reference)):
        tutorial = re.search(r"examples/tutorials/(\w+)\.py$", file.get("reftarget", ""))
        if tutorial:
            uri = app.builder.get_relative_uri(page, f"tutorials/{tutorial[1]}")
            file.replace_self(nodes.reference("", "", *file.children, refuri=uri, internal=True))
    pages = pages_of_classes()
    for code in list(tree.findall(nodes.literal)):
        inside = isinstance(code.parent, (nodes.reference, nodes.title, addnodes.download_reference))
        target = pages.get(re.sub(r"\(.*\)$", "", code.astext(), flags=re.DOTALL), page)
        if not inside and target != page:
            link = nodes.reference("", "", refuri=app.builder.get_relative_uri(page, target), internal=True)
            code.replace_self(link)
            link += code


def setup(app: Sphinx) -> dict[str, bool]:
    """Make this module an extension."""
    app.connect("builder-inited", generate, priority=100)
    app.connect("autodoc-process-signature", without_types)
    app.connect("doctree-resolved", link_pages)
    app.add_css_file("flow.css")
    return {"parallel_read_safe": True}
