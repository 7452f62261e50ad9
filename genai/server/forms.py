"""Bodies of the type multipart/form-data, which clients send to upload files."""

from __future__ import annotations

from dataclasses import dataclass
from email.message import EmailMessage
from email.parser import HeaderParser

from ..errors import RequestError

_MOST_PARTS, _MOST_HEADER_BYTES = 50, 8192


@dataclass(frozen=True)
class FormPart:
    """A field of a form.

    Attributes:
        data: the content.
        filename: the name of an uploaded file; None for other fields.
    """

    data: bytes
    filename: str | None = None

    @property
    def text(self) -> str:
        """The content as text."""
        return self.data.decode("utf-8", "replace")


def read_form(content_type: str, body: bytes) -> dict[str, FormPart]:
    """Return the fields of a form by their names.

    Args:
        content_type: the header content-type.
        body: the body.

    Raises:
        RequestError: the body is not a form, or has too many fields.
    """
    head = EmailMessage()
    head["content-type"] = content_type if content_type.isprintable() else ""
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        raise RequestError(
            415, f"the content type is {content_type!r:.80}", "files are uploaded as forms",
            "send multipart/form-data with the fields file and purpose",
        )  # fmt: skip
    sections = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("utf-8", "replace"), _MOST_PARTS + 2)
    if len(sections) > _MOST_PARTS + 2:
        raise RequestError(400, "the form has too many fields", f"the limit is {_MOST_PARTS}", "send fewer fields")
    if len(sections) < 2 or not sections[-1].startswith(b"--"):
        raise RequestError(400, "the form is incomplete", "its last boundary is missing", "send the whole form")
    found: dict[str, FormPart] = {}
    for section in sections[1:-1]:
        headers, separator, data = section.partition(b"\r\n\r\n")
        if not separator or len(headers) > _MOST_HEADER_BYTES:
            raise RequestError(400, "a field of the form has no header", "each field has a name", "correct the form")
        read = HeaderParser().parsestr(headers.decode("utf-8", "replace").strip() + "\n\n")
        name = read.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise RequestError(400, "a field of the form has no name", "each field has a name", "correct the form")
        found[name] = FormPart(data, read.get_filename())
    return found
