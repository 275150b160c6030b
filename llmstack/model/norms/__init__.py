"""Normalisation methods: one file each, found by name through the registry."""

from llmstack.model.norms.method import NormMethod
from llmstack.model.norms.registry import METHODS, build_norm_method

__all__ = ["METHODS", "NormMethod", "build_norm_method"]
