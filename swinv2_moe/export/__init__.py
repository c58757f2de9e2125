"""Export of trained models to programs that run without this project."""

from swinv2_moe.export.export import ExportOptions, export_model
from swinv2_moe.export.programs import default_format

__all__ = ["ExportOptions", "default_format", "export_model"]
