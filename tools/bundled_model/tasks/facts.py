"""All facts in a fixed order: a fact's index is part of the held-out split's keys, so append new facts at the end."""

from .facts_ideas import IDEAS
from .facts_usage import COMMANDS, OPTIONS, PROJECT, PYTHON

FACTS = PROJECT + COMMANDS + OPTIONS + PYTHON + IDEAS
