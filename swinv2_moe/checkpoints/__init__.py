"""Checkpoints: what is written, what is checked when read, and the model that one gives."""
