"""The trainer's arguments, checked as they are given: every refusal names the thing, the value, the rule and the way out."""

from fedlightning.arguments.inputs import (
    assigned_models,
    check_clients,
    check_model,
    check_prediction_data,
    evaluated_clients,
    federated_data,
    held_out_clients,
)
from fedlightning.arguments.local import local_trainer_arguments, logged_clients
from fedlightning.arguments.newcomers import assigned_newcomers, check_new_clients, new_clients, new_clients_data
from fedlightning.arguments.place_checks import parse_time
from fedlightning.arguments.trainer_options import TrainerOptions

__all__ = [
    "TrainerOptions",
    "assigned_models",
    "assigned_newcomers",
    "check_clients",
    "check_model",
    "check_new_clients",
    "check_prediction_data",
    "evaluated_clients",
    "federated_data",
    "held_out_clients",
    "local_trainer_arguments",
    "logged_clients",
    "new_clients",
    "new_clients_data",
    "parse_time",
]
