"""`fedlightning site`: a site of a federation between machines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule

from fedlightning.commands.folders import refuse_taken
from fedlightning.config.errors import InputError
from fedlightning.config.parsing import CommandLine
from fedlightning.datamodules import FederatedDataModule, NaturalPartitioner, Partitioned
from fedlightning.resume.lock import only_writer
from fedlightning.resume.stop_requests import Terminated, endings
from fedlightning.sites.flower import certificates as files
from fedlightning.sites.flower import programs
from fedlightning.sites.flower import reachability as reach
from fedlightning.sites.runs import MOST
from fedlightning.sites.site import Site
from fedlightning.sites.site_log import SiteLog
from fedlightning.sites.status import NAME, printable, stamped
from fedlightning.trainer import FederatedTrainer

AGAIN = 3.0
"""Seconds until a site tries again to be let in."""
LET_IN, FAILED = "SuperNode ID", "Connection attempt failed"
"""What a SuperNode says when it is let in, and when it reaches nobody."""


class AtSite(CommandLine):
    """A site's command. The docstring of its method is the text of `--help`."""

    trainer: FederatedTrainer  # type: ignore[assignment]

    def site(
        self,
        superlink: str,
        name: str,
        clients: list[str | int] | None = None,
        folder: str = "site",
        certificates: str | None = None,
        insecure: bool = False,
        export: Literal["sites", "server"] = "sites",
        send_texts: bool = False,
        allow_other_code: bool = False,
        most_runs: int = MOST,
    ) -> None:
        """Take part in a federation with data that stay here.

        It starts Flower's SuperNode and trains what the server asks for, until it is stopped. The configuration is the run's,
        with this site's own data section; the server's must be the same but for that, and is refused otherwise. A data module
        that knows no clients is one client, which is called as the site is. Models and records of the clients lie in a folder
        here: start the site with the same folder again after it was stopped. It keeps most_runs of them at most
        (`fedlightning sites --runs`).
        """
        from fedlightning.arguments import federated_data
        from fedlightning.datamodules.held_out import without

        reach.host_and_port(superlink)
        if not files.is_name(name) or name != printable(name, NAME):
            raise InputError(f"name={name!r} is no name of a site: it is one of a folder, of 1 to {NAME} characters.")
        if most_runs < 1:
            raise InputError(f"most_runs={most_runs} must be at least 1.")
        if clients == []:
            raise InputError("clients=[]: a site has one client at least. Leave it out for all of its data's clients.")
        home = Path(folder).resolve()
        own = Path(certificates or f"certificates/{name}").resolve()
        if not insecure:
            files.needed(own, (files.CA, files.SITE, files.SIGNED))
        refuse_taken(home, "a site")
        data = federated_data(one_client(self.datamodule, name), None, None, None)
        data.prepare_data()
        data.setup("fit")  # now: data that are not there are said before anybody waits for this site
        known = here = list(data.client_ids)
        if clients is not None:
            here = [str(client) for client in clients]
            missing = next((client for client in here if client not in known), None)
            if missing is not None:
                raise InputError(f"clients: there is no client '{missing}'. The data have {', '.join(known[:20])}.")
            data = without(data, [client for client in known if client not in here])
        programs.prepare(home / "flower")
        blueprint, may_export = self.trainer.blueprint(self.model), export == "server"
        site = Site(
            name,
            blueprint,
            data,
            home,
            export=may_export,
            send_texts=send_texts,
            allow_other_code=allow_other_code,
            most_runs=most_runs,
        )
        stopped: BaseException | None = None
        with only_writer(home), endings() as request:
            print(stamped(f"Site '{name}' takes part in what {superlink} asks for. Stop it with Ctrl-C."), flush=True)
            site.log = SiteLog(home, name, superlink, here)
            try:
                take_part(site, home, superlink, None if insecure else own)
            except (KeyboardInterrupt, Terminated) as ending:
                stopped = ending
            finally:
                site.log.end()
        if stopped is not None:
            print(stamped(f"Stopped by {request.name or 'Ctrl-C'}. Start it again with the same folder."), flush=True)
            raise SystemExit(request.code or 130)


def one_client(data: Any, name: str) -> Any:
    """Return a plain data module as that of one client, which is called as the site is; any other as it is."""
    if not isinstance(data, LightningDataModule) or isinstance(data, FederatedDataModule):
        return data
    print(stamped(f"{type(data).__name__} knows no clients: all of its data are those of client '{name}'."), flush=True)
    whole = NaturalPartitioner(groups=lambda dataset: np.full(len(dataset), name))
    return Partitioned(data, whole, val_fraction=0.0, test_fraction=0.0)  # what it has for validation and test


def take_part(site: Site, home: Path, server: str, own: Path | None) -> None:
    """Take part for ever: a SuperNode ends where the SuperLink does not know it yet, or no more."""
    site_log, authority = site.log, None if own is None else own / files.CA
    log = programs.Log(home / "supernode.log")

    def lives() -> bool:
        """Look at what the SuperNode says, beside the work."""
        for line in log.new_lines():
            if LET_IN in line:
                site_log.connection(None)
            elif FAILED in line:
                site_log.connection(reach.unreachable(server, authority))
        return True

    while True:
        reason = reach.unreachable(server, authority)
        if reason is not None:
            site_log.connection(reason)
        else:
            with programs.supernode(home, server, own, site.name, site_log.refused) as answer_all:
                answer_all(site.answer, lives)
            lives()
            reason = reach.unreachable(server, authority)
            key = "" if own is None else f"{own / files.SITE}, or another process is connected with it"
            said = log.reason()
            if said is None:  # it was killed
                reason = reason or f"This site's SuperNode has ended ({home / 'supernode.log'})."
            site_log.connection(
                reason
                or f"{server} does not let this site in: {said}" + (f" It does not know the key {key}." if key else "")
            )
        time.sleep(AGAIN)
