"""How good a model is, and where two runs part: questions, perplexity, KL divergence, and differences value by value.

Knows models, texts and the values inside a plan; asks the decoder for logits and never changes what it computes. Does
not know flags or how results are printed. onnxruntime is imported only where a comparison with it is asked for.
"""

from .divergence import Divergence as Divergence, kl_divergence as kl_divergence
from .model_diff import (
    ModelDiff as ModelDiff,
    ValueDiff as ValueDiff,
    diff_models as diff_models,
    diff_with_onnxruntime as diff_with_onnxruntime,
)
from .prediction import Perplexity as Perplexity, perplexity as perplexity
from .scored_text import ScoringProgress as ScoringProgress, encode_prompt as encode_prompt
from .tasks import (
    Outcome as Outcome,
    Question as Question,
    evaluate as evaluate,
    read_questions as read_questions,
    summary as summary,
)
