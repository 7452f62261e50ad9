"""Ask one question and print the reply while it is generated."""

import sys

import genai as og
from genai.models.folders import bundled_model

model = og.Model(sys.argv[1] if len(sys.argv) > 1 else bundled_model())
tokenizer = og.Tokenizer(model)

messages = [{"role": "user", "content": "What is 12 + 7?"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)

generator = og.Generator(model, og.GeneratorParams(model))
generator.append_tokens(tokenizer.encode(prompt))

stream = tokenizer.create_stream()
while not generator.is_done():
    generator.generate_next_token()
    print(stream.decode(generator.get_next_tokens()[0]), end="", flush=True)
print(stream.flush())
