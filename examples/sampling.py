"""Sample a reply with three seeds, two of which are equal, to show that equal seeds produce equal replies."""

import sys

import genai as og
from genai.models.folders import bundled_model

model = og.Model(sys.argv[1] if len(sys.argv) > 1 else bundled_model())
tokenizer = og.Tokenizer(model)
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Tell me a story about Luna and Tom."}], add_generation_prompt=True
)


def story(seed: int) -> str:
    params = og.GeneratorParams(model)
    params.set_search_options(do_sample=True, temperature=0.9, top_k=0, top_p=0.95, random_seed=seed, max_length=160)
    with og.Generator(model, params) as generator:
        generator.append_tokens(tokenizer.encode(prompt))
        start = generator.token_count()
        while not generator.is_done():
            generator.generate_next_token()
        return tokenizer.decode(generator.get_sequence(0)[start:])


first, second, other = story(1), story(1), story(2)
assert first == second
print(f"seed 1: {first}\n\nseed 2: {other}")
