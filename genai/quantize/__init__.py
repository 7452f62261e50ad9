"""Quantisation of whole models, from a model folder to a folder with a report. The methods are in `genai.quant`."""

from __future__ import annotations

from .options import QuantizeOptions as QuantizeOptions
from .report import Report as Report
from .run import quantize_model as quantize_model
