"""Checkpoints that a run exports: native Lightning checkpoints, wrapped or not; writing and opening them.

Warm start: the model that a federation begins with, from a file.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor

from fedlightning.codec.allowed import ROOMS, Trust, UntrustedError, is_trusted, look_up, refuse_untrusted_names, within
from fedlightning.codec.exotic_values import slow_keys
from fedlightning.codec.modules import from_tree, native, to_tree
from fedlightning.codec.tree import NotPlainError
from fedlightning.compat.lightning_runs import configure, detached_copy, quiet
from fedlightning.errors import ConfigurationError
from fedlightning.storage.files import UnreadableError, check_seal, read_tensors, replacing, save_tensors, seal
from fedlightning.tensors import State, load_state, module_state, state_digest


def load_initial_weights(module: LightningModule, path: str | Path | None) -> LightningModule:
    """Return the module with the weights of a checkpoint; the module itself, which is not changed, where there is none.

    Only tensors and plain values are read from the file (`weights_only=True`): loading it runs no code.

    Example:
        >>> from fedlightning.models import Classifier, TinyNet
        >>> load_initial_weights(Classifier(TinyNet(), num_classes=1), "none.ckpt")
        Traceback (most recent call last):
        fedlightning.errors.ConfigurationError: init_from='none.ckpt' is not a file. Give the path of a checkpoint.
    """
    if path is None:
        return module
    state, module_entries = read_state(path), module_state(module)
    where = f"init_from={str(path)!r} does not fit {type(module).__name__}"
    missing = [name for name in module_entries if name not in state]
    unexpected = [name for name in state if name not in module_entries]
    if missing or unexpected:
        parts = [f"{what} {_some(names)}" for what, names in (("lacks", missing), ("has besides", unexpected)) if names]
        raise ConfigurationError(
            f"{where}: the file {' and '.join(parts)}. Save the state_dict of a module like this one, with its names."
        )
    for name, value in module_entries.items():
        if state[name].shape != value.shape:
            raise ConfigurationError(
                f"{where}: '{name}' has the shape {tuple(state[name].shape)} in the file and {tuple(value.shape)} in the "
                "module. Build the module as it was built then, or leave init_from out."
            )
    started = detached_copy(module)
    load_state(started, state)
    return started


def read_privacy(path: str | Path) -> dict[str, Any]:
    """Return the epsilon and delta that an exported checkpoint says were spent on it; empty if it says none."""
    content: Any = torch.load(path, map_location="cpu", weights_only=True)
    header = content.get("fedlightning") if isinstance(content, Mapping) else None
    privacy = header.get("privacy") if isinstance(header, Mapping) else None
    spent = {name: privacy.get(name) for name in ("epsilon", "delta")} if isinstance(privacy, Mapping) else {}
    return spent if spent and all(isinstance(value, float) and value >= 0 for value in spent.values()) else {}


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint or of a file with a `state_dict`, on the CPU."""
    if not os.path.isfile(path):  # is_file() raises where a name is too long
        raise ConfigurationError(f"init_from={str(path)!r} is not a file. Give the path of a checkpoint.")
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds at damaged files
        raise ConfigurationError(
            f"init_from={str(path)!r} cannot be read as tensors and plain values, which is all that is loaded from it "
            f"(anything else could run code): {(str(error).splitlines() or ['it is empty'])[0][:120]} Save weights alone: "
            "torch.save(module.state_dict(), path)."
        ) from error
    state = content.get("state_dict", content) if isinstance(content, Mapping) else None
    header = content.get("fedlightning") if isinstance(content, Mapping) else None
    # an export without its frozen network
    if isinstance(state, Mapping) and isinstance(header, Mapping) and "base" in header:
        try:
            state = {**state, **_base_values(Path(path), header["base"])}
        except UnreadableError as error:
            raise ConfigurationError(f"init_from={str(path)!r} cannot be begun with: {error}.") from error
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigurationError(
            f"init_from={str(path)!r} holds neither a Lightning checkpoint nor a state_dict. Save one with "
            "torch.save(module.state_dict(), path)."
        )
    return {name: value for name, value in state.items() if value.numel() or "fedlightning.load" not in name}


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + rest


class _Writer(CheckpointIO):
    """Writes Lightning's checkpoint with an entry of our own, without what would need code to be read."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.left_out: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.left_out = []
        content = self._plain(checkpoint) | {"fedlightning": self.header}
        if "wrapped" in self.header:  # the one place whose names load_from_checkpoint shows where they do not fit
            content["state_dict"] = {OPEN_WITH_LOAD: torch.empty(0), **content["state_dict"]}
        save_tensors(content, Path(path))
        seal(Path(path))

    def _plain(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        plain = {}
        for name, value in checkpoint.items():
            if name in ("state_dict", LightningModule.CHECKPOINT_HYPER_PARAMS_KEY):
                kept = {key: self._entry(f"{name}['{key}']", entry) for key, entry in value.items()}
                plain[name] = {key: entry for key, entry in kept.items() if entry is not _LEFT_OUT}
            else:
                plain[name] = self._entry(f"['{name}']", value)
        return {name: value for name, value in plain.items() if value is not _LEFT_OUT}

    def _entry(self, name: str, value: Any) -> Any:
        try:
            return native(value)
        except NotPlainError:
            self.left_out.append(name)
            return _LEFT_OUT

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink()


_LEFT_OUT = object()
OPEN_WITH_LOAD = "(this file holds a module that a federated method has wrapped: open it with fedlightning.load(path))"
"""Name of an empty entry in the `state_dict` of a wrapped module, for who opens the file with `load_from_checkpoint`."""


class Exporter:
    """Saves modules as Lightning saves them, so that ``MyModule.load_from_checkpoint`` opens the files.

    A wrapped module is another class than the user's (a dual extractor) or holds other entries (adapters put into
    it); it is written down along, as a plain tree under ``"fedlightning"``, and :func:`load` opens it;
    ``load_from_checkpoint`` says so, in the list of names that do not fit. So is a module with
    hyper-parameters that are not plain values, which the file must not hold: a file with code in it is a file that runs code.

    Frozen parameters of a wrapped module that are as every module was built (`base_of`) are not in its file: they lie once
    in `base-HASH.pt` beside the global model, and :func:`load` puts both together.

    Args:
        template_of: Gives the user's module of an architecture, unwrapped.
        base_of: Gives the frozen parameters of an architecture's wrapped modules.
    """

    def __init__(
        self, template_of: Callable[[str], LightningModule], base_of: Callable[[str], State] = lambda architecture: {}
    ) -> None:
        self._template_of, self._base_of = template_of, base_of
        self._shapes: dict[str, tuple[type[LightningModule], dict[str, torch.Size]]] = {}
        self._writer = _Writer()
        with quiet():
            self._trainer = Trainer(
                accelerator="cpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                plugins=[self._writer],
            )

    def _of(self, architecture: str) -> tuple[type[LightningModule], dict[str, torch.Size]]:
        """Return the class of the user's module and its entries' shapes."""
        if architecture not in self._shapes:
            complete = detached_copy(self._template_of(architecture))
            configure(complete, lambda: self._trainer)
            shapes = {name: value.shape for name, value in module_state(complete).items()}
            self._shapes[architecture] = type(complete), shapes
        return self._shapes[architecture]

    def save(self, path: Path, module: LightningModule, extra: dict[str, Any], architecture: str = "") -> None:
        """Save a module."""
        kind, template_shapes = self._of(architecture)
        header = {"class": f"{kind.__module__}:{kind.__qualname__}", **extra}
        shapes = {name: value.shape for name, value in module_state(module).items()}
        self._writer.header = header
        is_wrapped = type(module) is not kind or shapes != template_shapes
        with self._without_base(path, module, self._base_of(architecture) if is_wrapped else {}):
            if is_wrapped:
                self._write_down("wrapped", module, f"{path.name} holds the weights of a wrapped {kind.__name__}")
            else:
                describe(header, module)
            with replacing(path) as temporary:
                self._write(temporary, module)
                if self._writer.left_out and not header.keys() & {"wrapped", "module"}:
                    left = ", ".join(self._writer.left_out)
                    self._write_down("module", module, f"{path.name} is without {left}, which are not plain values")
                    self._write(temporary, module)

    @contextmanager
    def _without_base(self, path: Path, module: LightningModule, base: State) -> Iterator[None]:
        """Within the block, parameters of a module that are in a file of their own are empty."""
        state, parameters = module_state(module), dict(module.named_parameters(remove_duplicate=False))
        base = {name: value for name, value in base.items() if name in state and torch.equal(state[name].cpu(), value)}
        if sum(value.nbytes for value in base.values()) < LEAST:
            yield
            return
        name = state_digest(base)
        self._writer.header["base"] = {"hash": name, "names": list(base)}
        write_base(path.parent.parent if path.parent.name == "clients" else path.parent, name, base)
        values = {entry: parameters[entry].data for entry in base}
        try:
            for entry, value in values.items():
                parameters[entry].data = value.new_empty(0)
            yield
        finally:
            for entry, value in values.items():
                parameters[entry].data = value

    def _write(self, temporary: Path, module: LightningModule) -> None:
        temporary.unlink(missing_ok=True)  # a link that a killed run left would be written through
        with quiet():
            self._trainer.strategy.connect(module)
            self._trainer.save_checkpoint(temporary, weights_only=True)
        module.trainer = None

    def _write_down(self, entry: str, module: LightningModule, what: str) -> None:
        """Add the module as a plain tree, or warn of what then is missing."""
        try:
            self._writer.header[entry] = to_tree(module, "it")
        except NotPlainError as error:
            reason = str(error).partition(", which cannot be saved")[0]
            warnings.warn(
                f"{what}, and the module cannot be written down ({reason[:1].lower()}{reason[1:]}); fedlightning.load needs "
                "a module to load the weights into. Use importable classes and functions, and plain hyper-parameters.",
                UserWarning,
                stacklevel=3,
            )


LEAST = 2**20
"""Bytes from which a frozen network has a file of its own."""


def base_file(name: str) -> str:
    """Return the name of the file of a frozen network, by its hash."""
    return f"base-{name[:16]}.pt"


def write_base(folder: Path, name: str, base: State) -> None:
    """Write a frozen network with a hash, unless it is there."""
    file = folder / base_file(name)
    if not file.exists():
        with replacing(file) as temporary:
            save_tensors(base, temporary)
            seal(temporary)


def describe(header: dict[str, Any], module: LightningModule) -> None:
    """Write a module of ours down as a plain tree, which opens without trust: nothing is called with what a file says."""
    if is_ours(module):
        with suppress(NotPlainError):
            header["module"] = to_tree(module, "it")


def is_ours(module: LightningModule) -> bool:
    """Return True if the class of a module is of this package."""
    return within(type(module).__module__, ROOMS)


def link(path: Path, same: Path) -> None:
    """Make `path` a hard link to `same` (a copy where the file system has no links)."""
    with replacing(path) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(same, temporary)
        except OSError:
            shutil.copyfile(same, temporary)


def load(
    path: str | Path, module: LightningModule | None = None, *, trust: Trust = False, **hparams: Any
) -> LightningModule:
    """Open a checkpoint that a run exported, wrapped or not, in eval mode.

    Reading the file runs no code of its own. Of the classes that it names FedLightning's own and layers of torch,
    torchvision, timm and peft are made, by setting their attributes; your own need `trust` or a `module`.

    Args:
        path: `checkpoints/global.ckpt` or `checkpoints/clients/<id>.ckpt`.
        module: An instance to load into, where the class cannot be made from the saved hyper-parameters. Its
            `configure_model` is called. For a file of adapters whose `base-HASH.pt` is not beside it: the module with that
            frozen network, without adapters.
        trust: Packages and modules that may be imported and whose classes and functions may be named and called, as in
            `["my_package"]`; or True: whatever the file names.
        hparams: Hyper-parameters that override the saved ones, as in `load_from_checkpoint`. The class has to be trusted.

    Raises:
        FileNotFoundError: If there is no such file.
        UntrustedError: If the file names something else that is not trusted.
        UnreadableError: If it is no such file.

    Example:
        >>> load("runs/federation/version_0/checkpoints/global.ckpt")
        Traceback (most recent call last):
        FileNotFoundError: There is no checkpoint at runs/federation/version_0/checkpoints/global.ckpt. A run exports ...
    """
    path = Path(path)
    if not os.path.isfile(path):  # is_file() raises where a name is too long
        raise FileNotFoundError(f"There is no checkpoint at {path}. A run exports to <run>/checkpoints/ when it ends.")
    try:
        loaded = _opened(path, module, trust, hparams)
    except UntrustedError as error:
        raise UntrustedError(f"{path} is not opened: {error} (trust=True: whatever it names).") from None
    except (UnreadableError, NotPlainError) as error:
        raise UnreadableError(f"{path} is not a checkpoint that a run exported: {error}.") from None
    return loaded


def _opened(path: Path, module: LightningModule | None, trust: Trust, hparams: dict[str, Any]) -> LightningModule:
    checkpoint = _read(path)
    checkpoint["state_dict"].pop(OPEN_WITH_LOAD, None)
    header = checkpoint["fedlightning"]
    wrapped = header.get("wrapped")
    if wrapped is not None:
        loaded = from_tree(wrapped, trust)
        if isinstance(loaded, LightningModule) and "base" in header:
            _put_base(loaded, path, header["base"], module)
    elif module is not None:
        if "base" in header:
            checkpoint["state_dict"] |= _base_values(path, header["base"], otherwise=module)
        loaded = _filled(module, checkpoint)
    elif "module" in header and not hparams:
        loaded = from_tree(header["module"], trust)
    else:
        loaded = _from_class(path, checkpoint, trust, hparams)
    if not isinstance(loaded, LightningModule):
        raise UnreadableError(f"it holds a {type(loaded).__name__}, not a LightningModule")
    try:
        return loaded.eval()
    except (RecursionError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UnreadableError(f"what it holds is not a whole module ({error})") from None


def _put_base(loaded: LightningModule, path: Path, base: Any, module: LightningModule | None) -> None:
    """Put the frozen network of a wrapped module into it: of its file, or of an unwrapped module."""
    parameters = dict(loaded.named_parameters(remove_duplicate=False))
    for entry, value in _base_values(path, base, module).items():
        if entry not in parameters:
            raise UnreadableError(f"it has no '{entry}', which its frozen network has")
        parameters[entry].data = value.detach().clone()


def _base_values(
    path: Path, base: Any, module: LightningModule | None = None, otherwise: LightningModule | None = None
) -> State:
    """Return the frozen network of an export: of a module, or of its file, or `otherwise` of another module."""
    if (
        not isinstance(base, Mapping)
        or not isinstance(base.get("hash"), str)
        or not isinstance(base.get("names"), list)
    ):
        raise UnreadableError("it does not say which frozen network it belongs to")
    names, name = base["names"], base_file(base["hash"])
    file = next((folder / name for folder in (path.parent, path.parent.parent) if (folder / name).is_file()), None)
    module = otherwise if module is None and file is None else module
    values: Any
    if module is not None:
        plain = module_state(module)
        values = {entry: plain.get(entry, plain.get(str(entry).replace(".base_layer.", "."))) for entry in names}
    elif file is not None:
        check_seal(file)
        values = read_tensors(file)
    else:
        raise UnreadableError(
            f"the frozen network that it belongs to is in {name}, which is neither beside it nor in the folder above. Put it "
            "there, or pass the module with that network as module"
        )
    if not isinstance(values, dict) or not all(isinstance(values.get(entry), Tensor) for entry in names):
        raise UnreadableError(f"the frozen network has not the entries that it needs, such as '{names[0]}'")
    values = {entry: values[entry] for entry in names}
    if state_digest(values) != base["hash"]:
        raise UnreadableError(
            f"it belongs to the frozen network with the hash {base['hash'][:16]}, and this one has "
            f"{state_digest(values)[:16]}: its adapters would mean nothing there"
        )
    return values


def _filled(module: LightningModule, checkpoint: dict[str, Any]) -> LightningModule:
    """Return the module with the weights of the file, as `load_from_checkpoint` would fill one.

    One that builds its layers in `configure_model` builds them, and what the file lacks stays as it is where the module says
    `strict_loading = False`.
    """
    kind = type(module).__name__
    configure(module, _reader)
    try:
        module.on_load_checkpoint(checkpoint)
    except Exception as error:  # of the user's code
        raise UnreadableError(f"{kind}.on_load_checkpoint fails: {type(error).__name__}: {error}") from error
    entries, saved = module_state(module), checkpoint["state_dict"]
    # of get_extra_state
    extra = {name: saved[name] for name in module.state_dict() if name in saved and name not in entries}
    state = {name: value for name, value in saved.items() if name not in extra}
    more = next((name for name in state if name not in entries), None)
    if more is not None:
        raise UnreadableError(f"it has '{more}', which {kind} does not have")
    for name, value in entries.items():
        entry = state.get(name)
        if entry is None and not module.strict_loading:
            continue
        if not isinstance(entry, Tensor) or entry.shape != value.shape:
            has = f"has shape {tuple(entry.shape)}" if isinstance(entry, Tensor) else "is missing"
            way = "" if isinstance(entry, Tensor) else " (a module that has it anyway says so: strict_loading = False)"
            raise UnreadableError(f"'{name}' of {kind}, of shape {tuple(value.shape)}, {has} in it{way}")
    load_state(module, state)
    module.load_state_dict(extra, strict=False)
    return module


def _reader() -> Trainer:
    with quiet():
        return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file."""
    check_seal(path)
    slow = slow_keys(path)
    if slow is not None:
        raise UnreadableError(slow)
    checkpoint = read_tensors(path)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise UnreadableError("it has no state_dict")
    if not isinstance(checkpoint.setdefault("fedlightning", {}), dict):
        raise UnreadableError("its entry 'fedlightning' holds no named values")
    return checkpoint


def _from_class(path: Path, checkpoint: dict[str, Any], trust: Trust, hparams: dict[str, Any]) -> LightningModule:
    name = checkpoint["fedlightning"].get("class")
    if name is None:
        raise UnreadableError(
            "it does not say of which class it is. Open it with MyModule.load_from_checkpoint, or pass a module"
        )
    home = str(name).partition(":")[0]
    if not is_trusted(home, trust):
        raise UntrustedError(
            f"it names the class {name}, which would be called with what the file says. If it is yours and you trust the "
            f"file, say so with trust=['{home}'], or pass an instance as module"
        )
    try:
        cls = look_up(name, trust)
    except ValueError as error:
        if isinstance(error, UntrustedError):
            raise
        raise UnreadableError(str(error)) from None
    if not isinstance(cls, type) or not issubclass(cls, LightningModule):
        raise UnreadableError(f"{name} is not a LightningModule")
    if trust is not True:
        refuse_untrusted_names(checkpoint, trust)
    try:
        loaded: LightningModule = cls.load_from_checkpoint(path, map_location="cpu", weights_only=True, **hparams)
    except Exception as error:  # whatever its constructor makes of the file's values
        reason = " ".join(str(error).split())
        raise UnreadableError(f"a {cls.__name__} cannot be made from it, pass one as module: {reason[:300]}") from error
    return loaded
