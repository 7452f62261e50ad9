"""The entry point of `python -m genai`, which is the command line."""

from genai.cli.__main__ import main

if __name__ == "__main__":
    main()
