"""Quantisation of whole models: folders in, folders and reports out. The methods themselves are in `genai.quant`."""

from __future__ import annotations

from .options import QuantizeOptions as QuantizeOptions
from .report import Report as Report
from .run import quantize_model as quantize_model
