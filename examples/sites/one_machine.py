"""A server and its sites on one machine, each a process in a folder of its own, by the commands of docs/how-to/deploy.md.

    python examples/sites/one_machine.py [--rounds 5] [--out runs/sites]        breast tumours, shared out over three sites
    python examples/sites/one_machine.py --root data/heart_disease              the four hospitals of Heart Disease

It makes certificates and keys, gives each folder what its machine would have and nothing else, starts the server and the
sites, waits, and prints where the models are. It needs Flower: pip install -c constraints-flower.txt -e ".[flower]".
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from sklearn.datasets import load_breast_cancer

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "sites"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
REGIONS = ("north", "south", "west")
"""Sites that the breast tumours are shared out over."""
GRACE = 20.0
"""Seconds that a process has to end after it is asked to."""


class Machines:
    """The server's and the sites' processes, in folders of their own; all of them end with the `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, machine: str, *words: str, show: bool = False) -> subprocess.Popen[bytes]:
        """Start a command of `fedlightning` in a machine's folder; what it says goes to a file, or is shown."""
        print(f"({machine}) fedlightning {shlex.join(words)}", flush=True)
        home = self.folder / machine
        home.mkdir(exist_ok=True)
        search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # a checkout works too
        with (home / "output.txt").open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedlightning", *words],
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=None if show else out,
                stderr=None if show else out,
                start_new_session=True,  # Ctrl-C reaches this program, which ends the others
                env=os.environ | {"PYTHONPATH": search, "PYTHONUNBUFFERED": "1"},
            )
        self.running[machine] = process
        return process

    def wait_for(self, machine: str) -> None:
        """Wait until a command has done its work. Ends this program if it, or one beside it, fails."""
        while (code := self.running[machine].poll()) is None:
            lost = next(
                (name for name, one in self.running.items() if name != machine and one.poll() is not None), None
            )
            if lost is not None:
                self.give_up(lost)
            time.sleep(0.2)
        if code != 0:
            self.give_up(machine)
        del self.running[machine]

    def give_up(self, machine: str) -> None:
        said = (self.folder / machine / "output.txt").read_text(errors="replace").strip().splitlines()
        raise SystemExit("\n".join([f"{machine} has ended (exit {self.running[machine].poll()}):", *said[-15:]]))

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        for how in (signal.SIGINT, signal.SIGKILL):  # as Ctrl-C: a server saves, a site ends its SuperNode
            for process in self.running.values():
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, how)
            ends = time.monotonic() + GRACE
            for process in self.running.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(ends - time.monotonic(), 0.1))


def heart_disease(root: Path, folder: Path) -> dict[str, Any]:
    """Give each hospital's folder its file and its data.yaml; return the common configuration."""
    for name in HOSPITALS:
        source = root / f"processed.{name}.data"
        if not source.is_file():
            raise SystemExit(f"{source} is not there: https://archive.ics.uci.edu/dataset/45/heart+disease has it.")
        own = yaml.safe_load((CONFIGS / "data.yaml").read_text())
        own["data"]["init_args"] |= {"root": "data", "hospitals": [name]}
        (folder / name / "data").mkdir(parents=True)
        shutil.copy(source, folder / name / "data")
        write(folder / name / "data.yaml", own)
    return common()


def breast_tumours(folder: Path) -> dict[str, Any]:
    """Share out scikit-learn's table: each site's folder has a CSV file of its own patients."""
    table = load_breast_cancer()
    columns = [name.replace(" ", "_") for name in table.feature_names]
    for number, name in enumerate(REGIONS):
        (folder / name / "data").mkdir(parents=True)
        with (folder / name / "data" / "patients.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["hospital", *columns, "malignant"])
            for values, benign in zip(
                table.data[number :: len(REGIONS)], table.target[number :: len(REGIONS)], strict=True
            ):
                writer.writerow([name, *values, 1 - benign])
        options = {
            "path": "data/patients.csv",
            "target": "malignant",
            "client": "hospital",
            "batch_size": 8,
            "classes": ["0", "1"],
        }
        data = {"class_path": "fedlightning.datamodules.TabularFederatedDataModule", "init_args": options}
        write(folder / name / "data.yaml", {"data": data})
    config = common()
    config["model"]["init_args"]["net"]["init_args"] = {"in_features": len(columns)}
    return config


def common() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CONFIGS / "run.yaml").read_text())
    return found


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Make the folders, start all commands, and tell what has come of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, help="folder with the four processed.*.data files of Heart Disease")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/sites"), help="new folder")
    parser.add_argument("--port", type=int, default=0, help="port of the server (default: one that is free)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the `with` block too

    out, port = options.out.resolve(), options.port or free_port()
    if out.exists():
        raise SystemExit(f"{out} is there already. Give another folder with --out, or remove it.")
    out.mkdir(parents=True)
    config = breast_tumours(out) if options.root is None else heart_disease(options.root, out)
    config["trainer"] |= {
        "max_rounds": options.rounds,
        "evaluation": {"every": min(5, options.rounds)},
        "version": "one",
    }
    sites = list(REGIONS if options.root is None else HOSPITALS)
    (out / "server").mkdir()
    for machine in ("server", *sites):
        write(out / machine / "run.yaml", config)  # the same for all

    with Machines(out) as machines:
        machines.start("keys", "certificates", "--hosts", "127.0.0.1", "--sites", *sites)
        machines.wait_for("keys")
        for machine in ("server", *sites):  # "give each machine its folder only"
            (out / machine / "certificates").mkdir()
            (out / "keys" / "certificates" / machine).rename(out / machine / "certificates" / machine)
        shutil.rmtree(out / "keys")

        serve = ["serve", "--config", "run.yaml", "--sites", str(len(sites)), "--port", str(port)]
        machines.start("server", *serve, show=True)
        for name in sites:
            place = ["--superlink", f"127.0.0.1:{port}", "--name", name]
            machines.start(name, "site", "--config", "run.yaml", "--config", "data.yaml", *place)
        machines.wait_for("server")

    run = out / "server" / "runs" / "sites" / "one"
    print(f"\nThe server has {run}: scores (metrics.csv, summary.json) and the shared part of the model.")
    for client, path in json.loads((run / "checkpoints" / "clients.json").read_text()).items():
        print(f"The model of {client} is at its site only: {out / client / 'site' / path}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted; the server and all sites have ended.")
