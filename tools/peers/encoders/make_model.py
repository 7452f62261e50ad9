"""Write a sentence-transformers folder with random weights.

usage: make_model.py FOLDER JOB, where JOB is JSON: {"model_type", "sizes", "pooling", "begins"}. begins is true if a
special token precedes each text.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import product
from string import ascii_lowercase

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
POSITIONS = 512


def make_tokenizer(size: int, *, begins: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the words aaaa, aaab and so on."""
    words = ["".join(letters) for letters in product(ascii_lowercase, repeat=4)][: size - len(SPECIAL)]
    made = Tokenizer(models.WordPiece({word: id_ for id_, word in enumerate([*SPECIAL, *words])}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]" if begins else "$A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]" if begins else "$A $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    roles = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=POSITIONS, model_input_names=["input_ids", "attention_mask"], **roles
    )


def main() -> None:
    """Write the folder."""
    folder, job = sys.argv[1], json.loads(sys.argv[2])
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(job["model_type"], **job["sizes"])).float()
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        make_tokenizer(job["sizes"]["vocab_size"], begins=job["begins"]).save_pretrained(place)
        modules = [Transformer(place, max_seq_length=POSITIONS)]
        modules += [Pooling(job["sizes"]["hidden_size"], job["pooling"]), Normalize()]
        SentenceTransformer(modules=modules, device="cpu").save(folder, create_model_card=False)


if __name__ == "__main__":
    main()
