"""The command-line reference agrees with the commands."""

from __future__ import annotations

from genai.cli.app import command
from tools.command_table import DOCS, environment, reference


def test_the_pages_are_up_to_date() -> None:
    for name, text in (("cli.md", reference()), ("environment.md", environment())):
        assert (DOCS / name).read_text(encoding="utf-8") == text, "run: python -m tools.command_table"


def test_every_option_has_help_and_a_variable_of_its_own() -> None:
    def check(one: object) -> None:
        variables: set[str] = set()
        for parameter in one.params:  # type: ignore[attr-defined]
            if parameter.name in ("help", "version", "install_completion", "show_completion"):
                continue
            assert parameter.help, parameter.name
            if parameter.param_type_name == "option":
                assert parameter.envvar.startswith("GENAI_")
                assert parameter.envvar not in variables
                variables.add(parameter.envvar)
        for child in getattr(one, "commands", {}).values():
            check(child)

    check(command())
