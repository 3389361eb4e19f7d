"""The demo of sites: compose.yaml, the unit for systemd and docs/how-to/deploy.md have the same commands, and they parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlightning.commands.certificates import parser
from fedlightning.commands.run import Commands
from fedlightning.commands.serve import CLASSES
from fedlightning.config.parsing import CommandLine

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "sites"
PAGE = (ROOT / "docs/how-to/deploy.md").read_text()
COMPOSE = yaml.safe_load((DEMO / "compose.yaml").read_text())
SITES = ("cleveland", "hungarian", "switzerland", "va")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if re.match(r"\S*fedlightning ", line) and " ..." not in line
]
"""Words of the page's commands."""


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = COMPOSE["services"][name]
    return found


def of_the_page(start: str) -> str:
    """Return the page's command that starts like this, without the program."""
    found = next(words for words in COMMANDS if shlex.join(words[1:]).startswith(start))  # later ones are variants
    return shlex.join(found[1:])


@pytest.fixture
def at_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("run", "data"):
        (tmp_path / f"{name}.yaml").write_bytes((ROOT / "configs" / "sites" / f"{name}.yaml").read_bytes())
        (tmp_path / "configs" / "sites").mkdir(parents=True, exist_ok=True)
        (tmp_path / "configs" / "sites" / f"{name}.yaml").write_bytes((tmp_path / f"{name}.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_s_commands_parse(at_a_site: Path) -> None:
    config = ["--config", "run.yaml", "--config", "data.yaml"]
    first: dict[str, list[str]] = {
        "fit": config,
        "serve": [*config[:2], "--sites=1"],
        "site": [*config, "--superlink=x:1", "--name=x"],
    }
    made: dict[str, CommandLine] = {}
    for _, command, *words in COMMANDS:
        if command in first:
            if command not in made:  # to build a parser takes longer than to use it
                made[command] = (CLASSES | {"fit": Commands})[command](command, first[command])
            made[command].parser.parse_args(words)
        elif command == "certificates":
            parser().parse_args(words)
        else:
            assert command in ("configs", "sites")
    assert set(made) == set(first) and COMPOSE["services"].keys() == {"certificates", "server", *SITES}


def test_containers_run_the_page_s_commands() -> None:
    host = "fl.example.org"
    assert service("server")["command"] == of_the_page("serve ")
    for name in SITES:
        shown = of_the_page("site ").replace(f"{host}:", "server:").replace("cleveland", name)
        shown = shown.replace("data.yaml", f"data.yaml --data.hospitals [{name}]")
        assert service(name)["command"] == shown
        assert service(name)["hostname"] == name  # the lock on a folder names it
    (script,) = service("certificates")["command"]
    (made,) = re.findall(r"fedlightning (certificates .*) --out made", script)
    assert made == of_the_page("certificates --hosts").replace(host, "server")
    assert re.findall(r"^for machine in (.*?);", script, re.MULTILINE) == [" ".join([*SITES, "server"])]


def test_a_container_has_what_is_its_own() -> None:
    for name in ("server", *SITES):
        mounts = service(name)["volumes"]
        texts = [mount if isinstance(mount, str) else f"{mount['source']}:{mount['target']}" for mount in mounts]
        others = {*SITES, "server"} - {name}
        assert not [text for text in texts for other in others if re.search(rf"(?<!-){other}\b", text.split(":/")[0])]
        keys = f"{name}-keys:/home/fedlightning/certificates/{name}:ro"
        assert keys in texts and len([text for text in texts if "-keys" in text]) == 1
        (data,) = [mount for mount in mounts if isinstance(mount, dict)] or [None]
        assert (data is None) == (name == "server")
        if data is not None:
            assert data["read_only"] and data["target"].endswith(f"data/heart_disease/processed.{name}.data")
            assert not data["bind"]["create_host_path"]  # a file that is not there is said, and becomes no folder
        files = [text for text in texts if text.startswith("../../")]
        assert all(text.endswith(":ro") and (DEMO / text.split(":")[0]).is_file() for text in files)
        wanted = ["run.yaml"] if data is None else ["run.yaml", "data.yaml"]
        assert [Path(text.split(":")[0]).name for text in files] == wanted
        assert service(name)["cap_drop"] == ["ALL"] and "environment" not in service(name)
        assert all(
            volume.split(":")[0] in COMPOSE["volumes"] for volume in texts if volume.split(":")[0].startswith(name)
        )


def test_the_image_has_neither_keys_nor_data_and_no_root() -> None:
    lines = (DEMO / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert {"pyproject.toml", "constraints-flower.txt", "fedlightning", "callbacks", "datamodules", "configs"} < {
        *copied
    }
    allowed = re.findall(r"^!(.*)$", (DEMO / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert sorted(allowed) == sorted(copied) and all((ROOT / name).exists() for name in copied)
    assert "USER fedlightning" in lines and lines.index("USER fedlightning") < lines.index(
        'ENTRYPOINT ["fedlightning"]'
    )
    (machines,) = re.findall(r'^ARG MACHINES="(.*)"$', "\n".join(lines), re.MULTILINE)
    assert {*machines.split()} == {"server", *SITES}  # or their volumes would belong to root


def test_the_unit_for_systemd_runs_the_page_s_command() -> None:
    unit = (DEMO / "fedlightning-site.service").read_text()
    (line,) = re.findall(r"^ExecStart=\S+/fedlightning (.*)$", unit, re.MULTILINE)
    assert line == of_the_page("site ")
