"""`serve`, `site` and `certificates` at the door; what they do over Flower is in tests/sites/flower."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.cli import main
from fedlightning.commands import serve as command
from fedlightning.commands.serve import Serve, one_client
from fedlightning.errors import ConfigurationError
from fedlightning.resume.lock import RunLock
from fedlightning.sites.flower import programs
from fedlightning.sites.flower import reachability as reach
from fedlightning.sites.flower.programs import Log, free_port
from fedlightning.sites.status import read

ROW = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0"
"""A patient of Heart Disease, but for the diagnosis."""
CONFIG = "configs/quickstart.yaml"
SERVE = ("serve", "--config", CONFIG, "--sites=2", "--insecure=true", "--trainer.failures.timeout=60")


def said(capsys, *words):
    assert main(words) == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def no_flower(monkeypatch, tmp_path):
    for name in ("flwr", "cryptography"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))  # put back as it was


@pytest.mark.parametrize(
    "words, reason",
    [
        (("serve", "--config", CONFIG, "--sites=2"), "has no ca.pem. Make certificates with"),
        (("serve", "--config", CONFIG, "--sites=0"), "sites=0 must be at least 1"),
        (("serve", "--config", CONFIG, "--sites=2", "--trainer.engine=processes"), "clients at sites train there"),
        (("serve", "--config", CONFIG, "--sites=2", "--insecure=true"), "trainer.failures.timeout is not set"),
        (
            (*SERVE, "--evaluate=true", "--trainer.init_from=m.ckpt"),
            "trains nothing, and trainer.callbacks has LocalCheckpoint, GlobalCheckpoint. Take them out of the file",
        ),
        ((*SERVE, "--port=0"), "port=0 must be from 1 to 65535"),
        ((*SERVE, "--host=203.0.113.1"), "host='203.0.113.1' is not an address of this machine"),
        ((*SERVE, "--port={free}"), "pip install flwr==1.41.0"),
        (("site", "--config", CONFIG, "--superlink=fl.example.org", "--name=a"), "is not an address of a server"),
        (("site", "--config", CONFIG, "--superlink=https://x:1", "--name=a"), "is not an address of a server"),
        (("site", "--config", CONFIG, "--superlink=x:99999", "--name=a"), "a port from 1 to 65535"),
        (("site", "--config", CONFIG, "--superlink=x:1", "--name=../a"), "is not a name of a site"),
        (
            ("site", "--config", CONFIG, "--superlink=x:1", "--name=a", "--clients=[]"),
            "clients=[]: a site has one client",
        ),
        (("site", "--config", CONFIG, "--superlink=127.0.0.1:1", "--name=a"), "certificates/a has no ca.pem"),
        (
            ("site", "--config", CONFIG, "--superlink=x:1", "--name=a", "--insecure=true", "--clients=[z]"),
            "no client 'z'",
        ),
        (("site", "--config", CONFIG, "--superlink=127.0.0.1:1", "--name=a", "--insecure=true"), "pip install"),
        (("certificates", "--sites", "a"), "pip install flwr==1.41.0"),
        (("certificates",), "--sites"),
        (("fit", "--config", CONFIG, "--trainer.engine=flower", "--trainer.name=x"), "fedlightning serve"),
    ],
    ids=[
        *(
            "keys",
            "sites",
            "engine",
            "timeout",
            "evaluate with methods",
            "port 0",
            "host elsewhere",
            "flower",
            "no port",
            "scheme",
            "port",
        ),
        *("name", "no client", "site keys", "client", "site flower", "certificates", "names", "fit"),
    ],
)
@pytest.mark.fast_cases(10)
def test_what_cannot_start_is_said_in_a_sentence(tmp_path, capsys, words, reason):
    folder = [f"--folder={tmp_path / 'place'}"] if words[0] in ("serve", "site") else []
    root = [f"--trainer.default_root_dir={tmp_path}"] if words[0] in ("serve", "fit") else []
    error = said(capsys, *(word.replace("{free}", str(free_port())) for word in words), *folder, *root)
    assert reason in error and "Traceback" not in error


@pytest.mark.parametrize("name", ["PublicDataModule", "DigitsDataModule"])
def test_a_server_looks_at_public_data_only(tmp_path, name):
    inner = {"public": {"class_path": "fedlightning.datamodules.DigitsDataModule"}}
    section = {"class_path": f"fedlightning.datamodules.{name}", "init_args": inner | {"public_labels": False}}
    path = tmp_path / "data.yaml"
    path.write_text(yaml.safe_dump({"data": section}))
    cli = Serve("serve", ["--config", CONFIG, "--config", str(path), "--sites=2"])
    assert type(cli.datamodule).__name__ == (name if name == "PublicDataModule" else "NoneType")


def test_data_that_are_not_at_the_site_are_said_before_it_waits_for_a_server(tmp_path, capsys):
    words = ["site", "--config", "configs/sites/run.yaml", "--config", "configs/sites/data.yaml", "--superlink=x:1"]
    error = said(capsys, *words, "--name=a", "--insecure=true", f"--folder={tmp_path}", f"--data.root={tmp_path}")
    assert "processed.cleveland.data not found in" in error


def test_words_that_a_sites_file_alone_has_are_named_before_it_waits_for_a_server(tmp_path, capsys):
    """With other words elsewhere a network's input would mean one thing at one site and another at the next."""
    rows = [f"{40 + i},{('no', 'yes', 'once')[i % 3]},{i % 2}" for i in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["age,smoker,ill", *rows]))
    options = {"path": str(tmp_path / "a.csv"), "target": "ill", "partitioner": {"class_path": "IIDPartitioner"}}
    options["partitioner"]["init_args"] = {"num_clients": 1}
    words = ["site", "--config", "configs/sites/run.yaml", "--config", str(tmp_path / "d.yaml"), "--superlink=x:1"]
    words += ["--name=a", "--insecure=true", f"--folder={tmp_path}"]
    for named, sentence in (
        (
            {},
            "alone decides classes: ['0', '1'], categories: {'smoker': ['no', 'once', 'yes']}. Another site's may have",
        ),
        ({"classes": ["0", "1"], "categories": {"smoker": ["no", "once", "yes"]}}, "pip install flwr"),
    ):
        data = {"class_path": "TabularFederatedDataModule", "init_args": options | named}
        (tmp_path / "d.yaml").write_text(yaml.safe_dump({"data": data}))
        assert sentence in " ".join(said(capsys, *words).split())


def test_a_site_knows_its_clients_before_flower_is_asked(tmp_path, monkeypatch):
    (tmp_path / "processed.cleveland.data").write_text("\n".join([ROW + ",0", ROW + ",1"] * 20))
    told = []
    monkeypatch.setattr("fedlightning.commands.serve.programs.prepare", lambda home: None)
    monkeypatch.setattr("fedlightning.commands.serve.take_part", lambda site, *_: told.append(site.log.status.clients))
    words = ["site", "--config", "configs/sites/run.yaml", "--config", "configs/sites/data.yaml", "--superlink=x:1"]
    assert main([*words, "--name=a", "--insecure=true", f"--folder={tmp_path}", f"--data.root={tmp_path}"]) == 0
    assert told == [["cleveland"]]


def test_no_keys_on_an_address_for_all_is_said_with_the_time(capsys, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "2031-01-02 03:04:05 ")
    found = said(capsys, *SERVE, "--host=0.0.0.0", "--trainer.failures.timeout=null")
    assert found.startswith("2031-01-02 03:04:05 Warning: insecure=True and host='0.0.0.0': whoever reaches port 8443")
    assert "whoever reaches" not in said(capsys, *SERVE, "--trainer.failures.timeout=null")


class Plain(LightningDataModule):
    """It knows nothing of clients, and makes its data anew in every setup."""

    def setup(self, stage=None):
        self.data = TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=5)


def test_a_plain_data_module_is_one_client_called_as_its_site(capsys):
    data = one_client(Plain(), "basel")
    data.prepare_data()
    data.setup("fit")
    assert data.client_ids == ["basel"] and data.sizes_of(["basel"]) == {"basel": (20, 20, 0)}
    assert data.client_dataloader("basel", "train").batch_size == 4
    assert "Plain knows no clients: all of its data are those of client 'basel'." in capsys.readouterr().out
    assert one_client(data, "zug") is data and one_client(None, "zug") is None


def test_a_folder_that_another_process_works_with(tmp_path, capsys):
    site = ("site", "--config", CONFIG, "--superlink=127.0.0.1:1", "--name=a", "--insecure=true")
    with RunLock(tmp_path):
        assert "a site needs a --folder of its own" in said(capsys, *site, f"--folder={tmp_path}")


def test_more_sites_than_keys(tmp_path, capsys):
    (tmp_path / "sites").mkdir()
    for name in ("ca.pem", "server.pem", "server.key", "sign.key", "sites/a.pub"):
        (tmp_path / name).touch()
    words = ("serve", "--config", CONFIG, "--sites=2", "--trainer.failures.timeout=60", f"--certificates={tmp_path}")
    assert "has keys of 1: no other can connect" in said(capsys, *words, f"--trainer.default_root_dir={tmp_path}")


def test_a_port_that_is_taken_is_said_and_a_server_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(reach, "FREED", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port={port} is taken by another program"):
            reach.check_port("127.0.0.1", port)
    assert "Nobody listens at" in reach.unreachable(f"127.0.0.1:{port}", None)

    def unknown(*_, **__):
        raise socket.gaierror

    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", unknown)
        patch.setattr(socket, "getaddrinfo", unknown)
        with pytest.raises(ConfigurationError, match="is not an address of this machine"):
            reach.check_port("no.such.host.invalid", port)
        assert "is not known" in reach.unreachable("no.such.host.invalid:1", None)
    reach.check_port("127.0.0.1", port)


def test_a_server_without_tls_and_a_damaged_authority(tmp_path):
    """One that closes every connection speaks no TLS, which suits a site without and no other."""
    (tmp_path / "ca.pem").write_text("nothing")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        place = f"127.0.0.1:{server.getsockname()[1]}"

        def close():
            for _ in range(2):
                connection, _ = server.accept()
                connection.recv(1)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        assert reach.unreachable(place, None) is None
        assert "is not a certificate" in reach.unreachable(place, tmp_path / "ca.pem")


def test_the_log_of_a_program_is_read_as_it_grows(tmp_path):
    path = tmp_path / "log"
    path.write_text("[code: 1] Of an earlier start.\n")
    log = Log(path)
    with path.open("a") as file:
        file.write("\x1b[92mINFO\x1b[0m: a\n[code: 2004] Failed to activate.\nhal")
    assert log.new_lines() == ["INFO: a", "[code: 2004] Failed to activate."]
    with path.open("a") as file:
        file.write("f\n")
    assert log.new_lines() == ["half"] and log.reason() == "Failed to activate."


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_site_that_is_stopped_says_so(tmp_path, capsys, monkeypatch, name, code):
    """systemd and `docker stop` send SIGTERM: nothing was logged, and the status said that the site was connected."""
    monkeypatch.setattr(programs, "prepare", lambda home: None)

    def stopped(site, *args):
        site.log.connection(None)
        os.kill(os.getpid(), getattr(signal, name))

    monkeypatch.setattr(command, "take_part", stopped)
    words = ("site", "--config", CONFIG, "--superlink=127.0.0.1:1", "--name=a", "--insecure=true")
    assert main((*words, f"--folder={tmp_path}")) == code
    said = "Ctrl-C" if name == "SIGINT" else name
    assert f"Stopped by {said}. Start it again with the same folder." in capsys.readouterr().out
    assert read(tmp_path).state == "ended" and not (tmp_path / ".lock").exists()
