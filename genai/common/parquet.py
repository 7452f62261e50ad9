"""pyarrow, which reads and writes Parquet files and is not installed with the package."""

from __future__ import annotations

from typing import Any

from ..errors import MissingPackageError


def import_parquet(what: str, other: str = "") -> tuple[Any, Any]:
    """Return the modules pyarrow and pyarrow.parquet.

    Args:
        what: what cannot be done without them, for the message.
        other: what the reader can do instead of installing pyarrow.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingPackageError(
            what, "Parquet files need pyarrow, which is not installed", f"run `pip install pyarrow`{other}"
        ) from error
    return pyarrow, parquet
