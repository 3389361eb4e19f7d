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
from fedlightning.arguments.local import check_keeping, ordinary_callbacks
from fedlightning.arguments.newcomers import assigned_newcomers, check_new_clients, new_clients, new_clients_data
from fedlightning.arguments.values import check, loop_of, parse_time

__all__ = [
    "assigned_models",
    "assigned_newcomers",
    "check",
    "check_clients",
    "check_keeping",
    "check_model",
    "check_new_clients",
    "check_prediction_data",
    "evaluated_clients",
    "federated_data",
    "held_out_clients",
    "loop_of",
    "new_clients",
    "new_clients_data",
    "ordinary_callbacks",
    "parse_time",
]
