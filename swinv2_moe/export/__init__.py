"""Export of trained models to programs that run without this project."""

from swinv2_moe.export.export import Choices, export_model

__all__ = ["Choices", "export_model"]
