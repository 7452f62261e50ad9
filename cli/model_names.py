"""The value of MODEL on the command line: a path, a name, or base+adapter."""

from __future__ import annotations

from pathlib import Path


def model_path(text: str | Path) -> Path:
    """Return MODEL as a path object. Raises ModelFolderError if the text is both a path and the name of a model.

    A Path object does not keep a leading ./, which marks a path. If the path does not exist, the result is absolute, so
    that no command takes it for a name.
    """
    from genai.hub.local import check_unambiguous, exists, has_form_of_path

    given = str(text)
    check_unambiguous(given)
    if has_form_of_path(given) and not exists(Path(given)):
        return Path(given).expanduser().absolute()
    return Path(given)
