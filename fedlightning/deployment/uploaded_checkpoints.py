"""Checkpoints of clients that come from other machines: checked, and written beside the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlightning.codec.packed import unpacked
from fedlightning.compat.attached import detached_copy
from fedlightning.deployment.checkpoints import describe, is_ours
from fedlightning.deployment.tasks import Deployed, file_of
from fedlightning.server.server import Server
from fedlightning.storage.files import read_tensors, save_tensors, seal, writing
from fedlightning.tensors import equal, load_state

OWN, HPARAMS = "fedlightning", "hyper_parameters"


class Brought:
    """Writes what clients' checkpoints hold into the run's folder, as if they had been written there.

    Args:
        server: Knows the architectures.
        folder: `checkpoints` of the run, where `global.ckpt` is already, if there is one.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        path = folder / "global.ckpt"
        self._whole = read_tensors(path) if path.exists() and server.global_module(None) is not None else None

    def keep(self, answer: Deployed) -> Deployed:
        """Write a client's checkpoint; return the answer without it. One that is the global model is not written."""
        if answer.reason is not None:
            return answer
        try:
            content, reason = unpacked(answer.content), None
        except ValueError as error:
            content, reason = None, f"its site sends no checkpoint of it: {error}"
        reason = reason or self._fault(answer.client, content)
        if reason is not None or content is None:
            return Deployed(answer.client, reason=reason)
        if self._whole is not None and _alike(content, self._whole):
            return Deployed(answer.client, is_shared=True)
        path = self._folder / "clients" / file_of(answer.client)
        temporary = path.with_name(path.name + ".tmp")
        with writing(path):
            temporary.unlink(missing_ok=True)
            self._describe(answer.client, content)
            save_tensors(content, temporary)
            seal(temporary)
            os.replace(temporary, path)
        return Deployed(answer.client, path=str(path))

    def _describe(self, client: str, content: dict[str, Any]) -> None:
        """Write the module down from this side's template, where the file needs no other."""
        module = detached_copy(self._server.blueprint.template_of(self._server.architecture_of(client).name))
        if "wrapped" not in content[OWN] and is_ours(module):
            content[OWN].pop("module", None)
            module.configure_model()
            with suppress(ValueError):  # of other entries: it opens with trust
                load_state(module, content["state_dict"])
                describe(content[OWN], module)

    def _fault(self, client: str, content: Mapping[str, Any] | None) -> str | None:
        """Return why this is no checkpoint of the client; `None`: it is one."""
        found, own = (content or {}).get("state_dict"), (content or {}).get(OWN)
        entries = isinstance(found, dict) and all(isinstance(entry, Tensor) for entry in found.values())
        if not entries or not isinstance(own, dict) or own.get("client") != client:
            return "its site sends no checkpoint of it"
        template = self._server.blueprint.template_of(self._server.architecture_of(client).name)
        known, given = template.hparams, (content or {}).get(HPARAMS, {})
        if not isinstance(given, dict):
            return "its site sends a checkpoint without named hyper-parameters"
        # Lightning calls the function that `_instantiator` names: no site says which
        names = (name for name in given if str(name).startswith("_"))
        strange = next((name for name in names if name not in known or known[name] != given[name]), None)
        return None if strange is None else f"its site sends a checkpoint with the hyper-parameter {strange!r:.60}"


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two checkpoints hold the same model of the same class."""
    mine, theirs = one["state_dict"], other["state_dict"]
    kinds = [(content[OWN].get("class"), "wrapped" in content[OWN]) for content in (one, other)]
    return kinds[0] == kinds[1] and equal(mine, theirs)
