"""Parameters, FLOPs, memory and use of the device by a model, computed in one place."""

from llmstack.accounting.devices import device_peak_flops, model_flops_utilisation
from llmstack.accounting.flops import CONVENTIONS, Convention, model_flops_per_token
from llmstack.accounting.parameters import ParameterCount, count_parameters
from llmstack.model import cache_bytes

__all__ = [
    "CONVENTIONS",
    "Convention",
    "ParameterCount",
    "cache_bytes",
    "count_parameters",
    "device_peak_flops",
    "model_flops_per_token",
    "model_flops_utilisation",
]
