"""Ask a question, continue the conversation, and complete a batch of prompts."""

import sys

import genai

with genai.LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    messages = [{"role": "user", "content": "My name is Nora."}]
    reply = llm.chat(messages)
    print(reply.text)

    messages += [reply.message, {"role": "user", "content": "What is my name?"}]
    print(llm.chat(messages).text)

    questions = ["What is 12 + 7?", "Spell the word cat.", "What day comes after Monday?"]
    for completion in llm.generate([llm.render(question) for question in questions], max_tokens=30):
        question = questions[completion.prompt_index]
        print(f"{question} {completion.text} ({completion.finish_reason}, {len(completion.token_ids)} tokens)")
