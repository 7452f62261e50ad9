"""Rules of the row analysis, one file per family of operators: where does the token axis go?

A rule gets the states of a node's inputs and returns the states of its outputs, or raises NotFlattenable. The batch
counts as 1 when axes are compared, because that is what it is after flattening. Rules know operators' meanings only.
"""

from . import along_axis, elementwise, exchange, movement, products
from .base import RULES, Rule, apply_rule, rule

__all__ = ["RULES", "Rule", "along_axis", "apply_rule", "elementwise", "exchange", "movement", "products", "rule"]
