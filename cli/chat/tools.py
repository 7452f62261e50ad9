"""`genai chat --tools MODULE.py`: Python functions that the model may call, with the user's permission."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genai.errors import InputError
from genai.text.tool_functions import described, tool_of

# Results are truncated to this length, because they become part of the next prompt.
_MOST_CHARACTERS = 4000


@dataclass(frozen=True)
class ToolFunctions:
    """The public functions of a module.

    Attributes:
        functions: the functions by name.
    """

    functions: Mapping[str, Callable[..., Any]]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools for chat templates. Raises InputError if a function or type has no schema."""
        return [tool_of(function, name) for name, function in self.functions.items()]

    def call(self, name: str, arguments: Any) -> str:
        """Call a function and return its result, or the error that it raised, as text for the model.

        Text that the function prints goes to stderr. Only KeyboardInterrupt propagates, because the user causes it.
        """
        function = self.functions.get(name)
        if function is None or not isinstance(arguments, dict):
            return f"Error: there is no function {name}; the functions are {', '.join(self.functions)}"
        try:
            with redirect_stdout(sys.stderr):
                result = function(**arguments)
                if inspect.iscoroutine(result):
                    import asyncio  # loads slowly, and few functions need it

                    result = asyncio.run(result)
                text = _text_of(result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() in a function ends the function, not the chat
            text = f"Error: {described(error)}"
        text = text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " … (truncated)"
        return text.encode("utf-8", "backslashreplace").decode("utf-8")  # a lone surrogate cannot be encoded


def _text_of(result: object) -> str:
    """Return a string unchanged, and any other result as JSON, or as str() if it is not serialisable."""
    if isinstance(result, str):
        return str(result)
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def read_functions(path: Path) -> ToolFunctions:
    """Execute a Python file and return the functions that it defines and whose names do not begin with an underscore.

    Raises:
        InputError: the file cannot be read, fails, defines no function, or has a function without a schema.
    """
    spec = importlib.util.spec_from_file_location(f"genai_tools_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(
            f"--tools {path}: not a Python file", "the tools are functions in a Python file", "pass a .py file"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # typing.get_type_hints looks up annotations here
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # includes SystemExit: a file that calls sys.exit() must not end the chat silently
        raise InputError(
            f"--tools {path}: {described(error)}",
            "the file is executed to find its functions",
            "fix the error in the file",
        ) from error
    named_functions = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == spec.name and not name.startswith("_")
    }
    if not named_functions:
        raise InputError(
            f"--tools {path} defines no public function",
            "tools are public functions",
            "define a function without a leading underscore",
        )
    functions = ToolFunctions(named_functions)
    _ = functions.tools
    return functions
