"""`fedlightning configs`: list the configurations that come with the package, and copy them."""

from __future__ import annotations

import json
import re
import shutil
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import yaml

import fedlightning
from fedlightning.commands.json_output import print_json
from fedlightning.config.input_errors import InputError, suggestion

FOLDER = Path(fedlightning.__file__).parent / "configs"
"""The shipped configurations."""
DESCRIPTION = """\
List the configurations that come with the package, or copy one or several into a folder,
where they can be changed and stacked:

  fedlightning configs copy quickstart algorithms/fenda
  fedlightning fit --config configs/quickstart.yaml --config configs/algorithms/fenda.yaml

A configuration that needs a table of one's own comes with a small made-up one.

schema prints a JSON Schema of configurations, by which editors complete and check YAML files:

  fedlightning configs schema > fedlightning.json
  # yaml-language-server: $schema=fedlightning.json      (first line of a YAML file)"""


def names() -> dict[str, Path]:
    """Return the shipped configurations: name without ending -> file."""
    return {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in sorted(FOLDER.rglob("*.yaml"))}


def configs(words: Sequence[str]) -> int:
    """Carry out the command and return its exit code."""
    parser = ArgumentParser(
        "fedlightning configs",
        description=DESCRIPTION,
        formatter_class=RawDescriptionHelpFormatter,
        exit_on_error=False,
    )
    parser.add_argument("action", nargs="?", choices=("list", "copy", "schema"), default="list", help="default: list")
    parser.add_argument("names", nargs="*", metavar="NAME", help="as listed; a folder's name stands for all in it")
    parser.add_argument("--to", type=Path, default=Path("configs"), metavar="DIR", help="default: configs")
    parser.add_argument("--force", action="store_true", help="overwrite files that are there")
    parser.add_argument("--json", action="store_true", help="list: one line of JSON, for programs")
    options = parser.parse_args(list(words))
    if options.action == "schema":
        from fedlightning.config.schema import config_schema

        print(json.dumps(config_schema(), indent=1))
        return 0
    files = names()
    if options.action == "list":
        listed = _chosen(options.names, files) if options.names else list(files)
        if options.json:
            about = [{"name": name, "file": files[name], "about": _about(files[name])} for name in listed]
            print_json("configs", configs=about)
            return 0
        for name in listed:
            print(f"{name:<44} {_about(files[name])}".rstrip())
        return 0
    if not options.names:
        raise InputError("name what to copy: fedlightning configs copy quickstart algorithms/fenda, or copy all.")
    targets = {name: options.to / f"{name}.yaml" for name in _chosen(options.names, files)}
    existing = [str(path) for path in targets.values() if path.exists()]
    if existing and not options.force:
        raise InputError(f"{existing[0]} is there already. Give another folder with --to, or --force to overwrite it.")
    for name, path in targets.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files[name], path)
        print(path)
        _copy_example(path)
    return 0


def _copy_example(config: Path) -> None:
    """Copy the made-up table of a configuration that needs a table of one's own to where it looks for that."""
    data = (yaml.safe_load(config.read_text()) or {}).get("data") or {}
    target = Path(str((data.get("init_args") or {}).get("path", "")))
    example = FOLDER / "data/examples" / target.name
    if example.is_file() and not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(example, target)
        print(f"{target}: a made-up table, in place of your own")


def _chosen(wanted: Sequence[str], files: dict[str, Path]) -> list[str]:
    """Return the names that are meant, each once; those of a folder for its name, and every one for `all`."""
    out: dict[str, None] = {}
    for word in wanted:
        name = word.removeprefix("configs/").removesuffix(".yaml").rstrip("/")
        matches = [
            candidate for candidate in files if name == "all" or candidate == name or candidate.startswith(f"{name}/")
        ]
        if not matches:
            hint = suggestion(name, files) or "fedlightning configs lists all."
            raise InputError(f"There is no configuration '{word}'. {hint}")
        out |= dict.fromkeys(matches)
    return list(out)


def _about(path: Path) -> str:
    """Return the first sentences of a file's comment: those of its first line, without one that introduces a command."""
    text = ""
    for line in takewhile(lambda line: re.match("# ?[^ ]", line), path.read_text().splitlines()):
        text = f"{text} {line.removeprefix('#').strip()}".strip()
        sentences = re.split(r"(?<=[.?]) (?=[A-Z(])", text)
        whole = [sentence for sentence in sentences if sentence.endswith((".", "?"))]
        if whole:
            return " ".join(whole)
    return text
