"""The package is one piece: links, wheel, versions, pins, and a tree that names no machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import fedlightning
from fedlightning.errors import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("callbacks", "datamodules")


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


PINS = "constraints.txt"
LOWEST = "constraints-lowest.txt"
TOOLS = {"dist", "docs", "test"}
"""Extras of which nobody needs old versions."""
APART = {"flower": "constraints-flower.txt"}
"""Extras whose own pins clash with ours: an environment of its own."""


def _pins(file: str = PINS) -> dict[str, Version]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    pins = {}
    for line in lines:
        name, _, version = line.partition("==")
        assert version, f"{file}: not a pin: {line}"
        pins[canonicalize_name(name)] = Version(version)
    assert len(pins) == len(lines), f"{file} pins a package twice"
    return pins


@pytest.mark.parametrize("name", LINKED)
def test_top_folder_is_linked_into_the_package(name: str) -> None:
    link = ROOT / "fedlightning" / name
    assert link.is_symlink(), f"{link} is not a symlink: clone with core.symlinks=true"
    assert link.readlink() == Path("..") / name
    assert (ROOT / name).is_dir() and not (ROOT / name).is_symlink()


@pytest.mark.parametrize("name", LINKED)
def test_linked_folder_imports_under_the_package_s_name(name: str) -> None:
    module = importlib.import_module(f"fedlightning.{name}")
    assert module.__name__ == f"fedlightning.{name}"
    assert module.__file__ is not None, f"{name}/__init__.py is missing"
    assert Path(module.__file__).resolve() == ROOT / name / "__init__.py"
    assert name not in sys.modules, f"{name} was also imported as a top-level package"


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for top in ("fedlightning", *LINKED) for path in (ROOT / top).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_versions_agree() -> None:
    assert "version" in _project()["dynamic"]
    literal = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "fedlightning" / "__init__.py").read_text(), re.MULTILINE)
    assert literal, "__version__ must be a literal: setuptools reads it without importing the package"
    assert literal[1] == fedlightning.__version__ == str(Version(fedlightning.__version__))
    try:
        installed = importlib.metadata.version("fedlightning")
    except importlib.metadata.PackageNotFoundError:
        return  # run from a bare checkout
    assert installed == fedlightning.__version__, "stale metadata: touch pyproject.toml && make install"


def test_pins_satisfy_the_requirements_and_cover_them() -> None:
    project = _project()
    extras = project["optional-dependencies"]
    needed = [(text, APART.get(extra, PINS)) for extra, lines in extras.items() for text in lines]
    needed += [
        (text, LOWEST) for extra, lines in extras.items() if extra not in {"dist", "docs", *APART} for text in lines
    ]
    needed += [(text, file) for text in project["dependencies"] for file in (PINS, LOWEST, *APART.values())]
    for text, file in needed:
        requirement, pins = Requirement(text), _pins(file)
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} has no pin in {file}"
        assert requirement.specifier.contains(pins[name], prereleases=True), f"{text}, but pinned to {pins[name]}"


def test_hashes_are_those_of_the_pins() -> None:
    """`make hashes` writes them. What no pin names goes to some systems only, as CUDA's packages do."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "constraints-hashes.txt").read_text()).replace("\\\n", " ")
    everywhere = {}
    for line in text.splitlines():
        requirement, *hashes = line.split(" --hash=")
        read = Requirement(requirement.strip())
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", value) for value in hashes), requirement
        (pin,) = read.specifier
        if read.marker is None or canonicalize_name(read.name) in _pins():
            everywhere[canonicalize_name(read.name)] = Version(pin.version)
    assert everywhere == _pins(), "make hashes"


def test_the_page_of_the_package_needs_no_repository() -> None:
    page, readme = (ROOT / "PACKAGE.md").read_text(), (ROOT / "README.md").read_text()
    assert _project()["readme"] == "PACKAGE.md"
    assert re.findall(r"!\[|\]\((?!https://)|<img", page) == [], "a picture or link that a page elsewhere does not have"
    for kind in (r"(?s)```python\n.*?```", r"(?m)^- .*$"):  # it says nothing of its own there
        assert set(re.findall(kind, page)) <= set(re.findall(kind, readme))
    assert f"fedlightning-{fedlightning.__version__}-py3-none-any.whl" in page


def test_lower_bounds_are_the_oldest_versions_that_are_tested() -> None:
    project, pins = _project(), _pins(LOWEST)
    extras = {
        extra: lines for extra, lines in project["optional-dependencies"].items() if extra not in TOOLS | {*APART}
    }
    for text in [*project["dependencies"], *(line for lines in extras.values() for line in lines)]:
        requirement = Requirement(text)
        bounds = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
        assert bounds == [pins[canonicalize_name(requirement.name)]], f"{text}: the bound is not the pin in {LOWEST}"


@pytest.mark.parametrize("file", [PINS, LOWEST])
def test_pins_hold_on_every_build_of_torch(file: str) -> None:
    assert [name for name, version in _pins(file).items() if version.local] == []


def test_core_imports_no_extra() -> None:
    project = _project()
    core = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    assert core.isdisjoint({"peft", "timm", "torchvision"})
    code = "import sys, fedlightning; print(sorted({'peft', 'timm', 'torchvision'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["make quickstart", "make test"])
def test_readme_s_commands_are_targets(command: str) -> None:
    assert command in (ROOT / "README.md").read_text()
    assert re.search(rf"^{command.removeprefix('make ')}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_ci_script_is_executable() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR


# Written in pieces, so that this file passes its own test.
FORBIDDEN = [
    "pypi" + r"\.org",
    "python" + r"hosted\.org",
    "pytorch" + r"\.org/whl",
    "npm" + r"js\.(org|com)",
    "yarn" + r"pkg\.com",
    "crates" + r"\.io",
    "proxy" + r"\.golang\.org",
    "deb" + r"ian\.org",
    "ana" + r"conda\.(org|com)",
    "rubygems" + r"\.org",
    r"(?<![\w.])/wo" + r"rk/",
    r"(?<![\w.])/ro" + r"ot/",
    r"(?<![\w)\]])\.lib" + r"rary\b",  # the folder, not torch's module
]


def _tree() -> list[Path]:
    """The files of the git tree: tracked, or neither tracked nor ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_the_tree_names_no_registry_and_no_machine() -> None:
    forbidden = re.compile("|".join(FORBIDDEN), re.IGNORECASE)
    tree = _tree()
    assert tree
    found = []
    for path in tree:
        for number, line in enumerate(path.read_bytes().decode("utf-8", errors="ignore").splitlines(), 1):
            if match := forbidden.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert found == []


def test_no_file_tells_to_install_this_package_from_an_index() -> None:
    """The name may be anybody's there. From a checkout and from a file of a wheel it is ours."""
    advice = re.compile(
        r"fedlightning" + r"\\*\[|pip3? install(?: -\S+)* [\"']?fedlightning" + r"(?![-\w./])", re.IGNORECASE
    )
    lines = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _tree()
        for number, line in enumerate(path.read_bytes().decode("utf-8", errors="ignore").splitlines(), 1)
        if advice.search(line)
    ]
    assert lines == []


def test_sentences_of_missing_packages_name_those_of_the_extras() -> None:
    users = {name: tuple(lines) for name, lines in _project()["optional-dependencies"].items() if name in EXTRAS}
    assert users == EXTRAS
    assert set(_project()["optional-dependencies"]) - set(EXTRAS) <= {"dist", "docs", "test"}


KINDS = {".css", ".html", ".jinja", ".js", ".mplstyle", ".toml"}
"""What lies beside code and is read as it runs."""


def _expected() -> set[str]:
    """Every file that a distribution must carry, by its path inside the package."""
    files = {
        f"fedlightning/{name}/{path.relative_to(ROOT / name)}"
        for name in LINKED
        for path in (ROOT / name).rglob("*.py")
    }
    files |= {str(path.relative_to(ROOT)) for path in (ROOT / "fedlightning").rglob("*.py")}
    beside = [path for path in (ROOT / "fedlightning").rglob("*.*") if path.suffix in KINDS]
    assert {path.suffix for path in beside} == KINDS
    files |= {str(path.relative_to(ROOT)) for path in beside}
    return files | {"fedlightning/py.typed"}


def _copy_of_the_tree(to: Path) -> Path:
    """A copy to build in (setuptools leaves build/ and *.egg-info behind), with its links kept as links."""
    for path in _tree():
        copy = to / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    for name in LINKED:
        link = to / "fedlightning" / name
        assert not link.exists()
        link.symlink_to(Path("..") / name)
    return to


@pytest.mark.slow
@pytest.mark.parametrize("through_sdist", [False, True], ids=["wheel", "wheel-from-sdist"])
def test_distributions_carry_real_files(tmp_path: Path, through_sdist: bool) -> None:
    source = _copy_of_the_tree(tmp_path / "source")
    if through_sdist:
        code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "sdist")], cwd=source, check=True)
        (archive,) = (tmp_path / "sdist").glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            members = {member.name.partition("/")[2]: member for member in tar.getmembers()}
            assert _expected() <= set(members)
            assert [name for name, member in members.items() if member.issym() or member.islnk()] == []
            tar.extractall(tmp_path / "extracted", filter="data")
        (source,) = (tmp_path / "extracted").iterdir()

    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*command, "-w", str(tmp_path / "wheel"), str(source)], check=True)
    (archive,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        infos = {info.filename: info for info in wheel.infolist()}
        assert _expected() <= set(infos)
        tops = {name.partition("/")[0] for name in infos}
        assert tops == {"fedlightning", f"fedlightning-{fedlightning.__version__}.dist-info"}
        assert not any(stat.S_ISLNK(info.external_attr >> 16) for info in infos.values())
        for name in LINKED:
            packed = wheel.read(f"fedlightning/{name}/__init__.py")
            assert packed == (ROOT / name / "__init__.py").read_bytes()
        metadata = wheel.read(f"fedlightning-{fedlightning.__version__}.dist-info/METADATA").decode()
    assert f"Version: {fedlightning.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata


def test_files_that_code_names_beside_itself_are_there():
    """A file that only a path names is not followed by tools that move modules."""
    named = 0
    for path in sorted((ROOT / "fedlightning").rglob("*.py")):
        for name in re.findall(r"Path\(__file__\)\.with_name\(\"([\w.]+)\"\)", path.read_text()):
            assert path.with_name(name).is_file(), f"{path} names {name}"
            named += 1
    assert named
