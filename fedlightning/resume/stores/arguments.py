"""What the user has named when a logger was made: the one place that looks at loggers' private names for it.

Lightning takes a version or a run's id when a logger is made, and says only what came of it; the user has made the logger.
"""

from __future__ import annotations

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger


def given_version(logger: Logger) -> int | str | None:
    """Return the version, or the id of the run, that the user has named."""
    if isinstance(logger, CSVLogger | TensorBoardLogger):
        return logger._version
    if isinstance(logger, WandbLogger):
        return None if logger.version is None else str(logger.version)
    if isinstance(logger, MLFlowLogger):
        return logger._run_id
    return logger.version if isinstance(logger.version, int) else str(logger.version)


def name_version(logger: CSVLogger | TensorBoardLogger, version: int | str) -> None:
    """Let a logger whose user named no version go on in the folder that it had."""
    logger._version = version


def name_run(logger: WandbLogger | MLFlowLogger, run_id: str) -> None:
    """Let a logger whose user named no run go on in the run that it had."""
    if isinstance(logger, MLFlowLogger):
        logger._run_id = run_id
    elif logger.version is None:
        logger._id = run_id
        # without a network there is nothing to look the run up in
        logger._wandb_init |= {"id": run_id, "resume": "allow" if is_offline(logger) else "must"}


def is_offline(logger: WandbLogger) -> bool:
    """Return whether a logger of Weights & Biases writes files only."""
    return bool(logger._offline)
