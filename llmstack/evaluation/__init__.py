"""Measures of trained models."""
