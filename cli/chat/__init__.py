"""`genai chat`: the command, the loop around a line editor, its slash-commands, and how replies are shown.

The conversation itself is genai.llm.chat.ChatSession; here is only what a person at a terminal sees and types.
"""
