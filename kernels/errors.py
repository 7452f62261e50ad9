"""The errors of devices, apart from `device`, so that functions of arrays need not import the interface of decoders."""


class StepCancelled(Exception):
    """The step was cancelled, so its results are incomplete."""


class DeviceFailed(RuntimeError):
    """An operation of the device failed; the message contains the device's own error text."""


class StepError(RuntimeError):
    """The step was rejected: a token, position or block is outside its table."""


class UnsupportedOp(ValueError):
    """A device cannot lower an op; the message names the op."""
