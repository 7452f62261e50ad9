"""What the columns of a sampling batch mean."""

from __future__ import annotations

# Steps; a row ends at the first END.
(END, PENALTIES, DRY, TOP_N_SIGMA, TOP_K, TYPICAL_P, TOP_P, MIN_P, XTC, TEMPERATURE, MIROSTAT) = range(11)
MAX_STEPS = 10

# Settings.
GREEDY = 0  # 1 = the most likely token, 0 = draw
DIVISOR = 1  # temperature
KEPT_TOKENS = 2  # top_k
NUCLEUS = 3  # top_p
RELATIVE_PROBABILITY = 4  # min_p
TYPICAL_MASS = 5  # typical_p
NUM_SIGMAS = 6  # top_n_sigma
EXCLUSION_PROBABILITY, EXCLUSION_THRESHOLD = 7, 8  # XTC
REPETITION, PRESENCE, FREQUENCY = 9, 10, 11  # penalties
PENALTY_LAST = 12  # tokens that penalties look at, may be infinite
DRY_MULTIPLIER, DRY_BASE, DRY_ALLOWED_LENGTH = 13, 14, 15
DRY_LAST = 16  # tokens that DRY looks at, may be infinite
MOST_SURPRISE = 17  # Mirostat's limit in bits
NGRAM_SIZE = 18  # n-grams of this size may not repeat; 0 = any may
NUM_SETTINGS = 19

# Spans: the row's logits (an index, or -1 - an index into `replaced`); its edits and its tokens, from first to end; the
# index of the first generated token among these (from the first); how many tokens at the end DRY may match.
SOURCE, FIRST_EDIT, END_EDIT, FIRST_TOKEN, END_TOKEN, FIRST_OUTPUT, DRY_LIMIT = range(7)
NUM_SPANS = 7
