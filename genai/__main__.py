"""`python -m genai` is the command line."""

from genai.cli.__main__ import main

if __name__ == "__main__":
    main()
