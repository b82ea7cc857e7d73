"""Encoders and heads on transformers."""
