"""`genai chat`: the command, its loop with a line editor, the slash-commands, and the display of replies.

The conversation itself is genai.llm.chat.ChatSession; this package contains only the terminal interface.
"""
