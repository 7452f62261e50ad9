"""Reply to several prompts of different lengths in one batch. Each reply is the same as it is without the batch."""

import sys

import genai as og
from genai.models.folders import bundled_model

model = og.Model(sys.argv[1] if len(sys.argv) > 1 else bundled_model())
tokenizer = og.Tokenizer(model)
questions = ["What is 12 + 7?", "Which is bigger, 31 or 13?", "What day comes after Monday?", "Spell the word cat."]
chats = [[{"role": "user", "content": question}] for question in questions]
prompts = [tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True)).tolist() for chat in chats]

params = og.GeneratorParams(model)
params.set_search_options(batch_size=len(prompts), max_length=96)
with og.Generator(model, params) as generator:
    generator.append_tokens(prompts)
    while not generator.is_done():
        generator.generate_next_token()
    for index, (question, prompt) in enumerate(zip(questions, prompts, strict=True)):
        print(f"{question} {tokenizer.decode(generator.get_sequence(index)[len(prompt) :])}")
