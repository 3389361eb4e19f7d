"""Arguments of `lightning.pytorch.Trainer` that a federation forwards to the Trainers of its clients."""

from __future__ import annotations

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
