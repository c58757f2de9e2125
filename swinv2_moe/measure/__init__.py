"""Measurements of a model: accuracy, throughput, routing."""
