"""Arguments of `lightning.pytorch.Trainer` that a federation forwards to the Trainers of its clients."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Annotated, Any

from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer

from fedlightning.compat.lightning_runs import quiet
from fedlightning.errors import ConfigurationError
from fedlightning.ranges import Range

CLUSTERS = (SLURMEnvironment, TorchElasticEnvironment, LSFEnvironment, MPIEnvironment)
"""What tells the processes of several machines about each other."""

BatchShare = Annotated[float, Range("(0, 1]", "A float is a share of an epoch, an int a number of batches.")]
SomeBatches = Annotated[float, Range("[0, 1]", "A float is a share of the batches, an int a number of them.")]

FORWARDED = (
    "accelerator",
    "strategy",
    "devices",
    "num_nodes",
    "precision",
    "plugins",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "deterministic",
    "benchmark",
    "inference_mode",
    "use_distributed_sampler",
    "profiler",
    "detect_anomaly",
    "sync_batchnorm",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "log_every_n_steps",
    "reload_dataloaders_every_n_epochs",
)
"""Passed on as the user gave them. `default_root_dir` is set, too, but from the folder of the run."""
OF_DEVICES = ("accelerator", "devices", "strategy", "num_nodes", "precision", "plugins", "profiler")
"""Those of them that a machine may lack."""


def check_forwarded(arguments: Mapping[str, Any]) -> None:
    """Refuse several machines where this process knows of none."""
    if arguments["num_nodes"] > 1 and not in_cluster(arguments["plugins"]):
        raise ConfigurationError(
            f"num_nodes={arguments['num_nodes']}, but this process was not started on several machines, and would wait for "
            "the others for ever. Start it with srun or torchrun, set MASTER_ADDR and NODE_RANK, or leave num_nodes out."
        )


def in_cluster(plugins: Any = None) -> bool:
    """Return True if this process knows of other machines, as Lightning finds out: from a launcher's variables."""
    plugins = plugins if isinstance(plugins, list | tuple) else [plugins]
    if any(hasattr(plugin, "main_address") and hasattr(plugin, "global_rank") for plugin in plugins):
        return True
    if {"MASTER_ADDR", "NODE_RANK"} <= os.environ.keys() or {"MASTER_ADDR", "GROUP_RANK"} <= os.environ.keys():
        return True
    return any(cluster.detect() for cluster in CLUSTERS)


def check_devices(device_arguments: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Refuse devices, a strategy or plugins that this machine lacks, by making the Trainer that a client would have.

    Args:
        device_arguments: The arguments of :data:`OF_DEVICES` that are not the usual ones.
        arguments: All arguments of the client's Trainer.
    """
    try:
        with quiet():
            Trainer(
                **{name: copy.deepcopy(arguments[name]) for name in arguments if name != "default_root_dir"},
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
    except Exception as error:
        text = " ".join(str(error).split())
        values = ", ".join(f"{name}={value!r}" for name, value in device_arguments.items())
        raise ConfigurationError(
            f"{values}: no client can train with that; {text.rstrip('.')} ({type(error).__name__})."
        ) from error
