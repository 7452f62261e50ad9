"""How good a model is, and where two runs part: questions, perplexity, KL divergence, and differences value by value.

Knows models, texts and the values inside a plan; asks the decoder for logits and never changes what it computes. Does
not know flags or how results are printed. onnxruntime is imported only where a comparison with it is asked for.
"""

from __future__ import annotations

from .divergence import Divergence, kl_divergence
from .model_diff import ModelDiff, ValueDiff, diff_models, diff_with_onnxruntime
from .prediction import Perplexity, perplexity
from .scored_text import Progress, encode_prompt
from .tasks import Outcome, Question, evaluate, read_questions, summary

__all__ = [
    "Divergence",
    "ModelDiff",
    "Outcome",
    "Perplexity",
    "Progress",
    "Question",
    "ValueDiff",
    "diff_models",
    "diff_with_onnxruntime",
    "encode_prompt",
    "evaluate",
    "kl_divergence",
    "perplexity",
    "read_questions",
    "summary",
]
