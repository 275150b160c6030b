"""Parameters, FLOPs, memory, speed and use of the device by a model, computed in one place."""

from llmstack.accounting.activations import Activations, Computation, count_activations
from llmstack.accounting.communication import Exchange, Links, exchanges, exposed_seconds, sent_bytes
from llmstack.accounting.devices import GPUS, Gpu, device_peak_flops, find_gpu, model_flops_utilisation
from llmstack.accounting.flops import CONVENTIONS, Convention, model_flops_per_token
from llmstack.accounting.memory import (
    GATHERED_ELEMENTS,
    Layout,
    MemoryEstimate,
    Terms,
    host_memory_bytes,
    require_fit,
    training_memory,
)
from llmstack.accounting.parameters import ParameterCount, count_parameters
from llmstack.accounting.planning import (
    Hardware,
    Plan,
    Scaling,
    Speed,
    make_plan,
    measured_speed,
    scaling,
    stated_speed,
)
from llmstack.model import cache_bytes

__all__ = [
    "CONVENTIONS",
    "GATHERED_ELEMENTS",
    "GPUS",
    "Activations",
    "Computation",
    "Convention",
    "Exchange",
    "Gpu",
    "Hardware",
    "Layout",
    "Links",
    "MemoryEstimate",
    "ParameterCount",
    "Plan",
    "Scaling",
    "Speed",
    "Terms",
    "cache_bytes",
    "count_activations",
    "count_parameters",
    "device_peak_flops",
    "exchanges",
    "exposed_seconds",
    "find_gpu",
    "host_memory_bytes",
    "make_plan",
    "measured_speed",
    "model_flops_per_token",
    "model_flops_utilisation",
    "require_fit",
    "scaling",
    "sent_bytes",
    "stated_speed",
    "training_memory",
]
