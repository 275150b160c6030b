"""Benches: measured figures beside their physical limit. Torch, safetensors and PyYAML alone."""
