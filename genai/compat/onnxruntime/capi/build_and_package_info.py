"""The name and the version of the package that provides onnxruntime's API."""

from ..shim import API_VERSION

package_name, __version__ = "onnxruntime", API_VERSION
