"""The quality of a model (questions, perplexity, KL divergence), and the point where two runs diverge (value diffs).

This package works on models, texts and the values inside a plan. It reads the decoder's logits and never changes the
decoder's computations. It does not depend on the command line. onnxruntime is imported only for comparisons with
onnxruntime.
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
