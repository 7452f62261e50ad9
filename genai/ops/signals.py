"""Spectra of frames, and the weights that combine frequencies into mel bands."""

from __future__ import annotations

from typing import Any

import numpy as np

from .casting import dtype_of
from .registry import KernelError, NodeSpec, operator, scalar
from .support import checked_shape


@operator("STFT", since_version=17)
def stft(
    signal: Any, frame_step: Any, window: Any = None, frame_length: Any = None, *, onesided: bool = True, spec: NodeSpec
) -> Any:
    """Compute the Fourier transform of windowed frames: [batch, samples, 1 or 2] to [batch, frames, frequencies, 2].

    A real signal may also be [batch, samples], as exporters write it and onnxruntime accepts it.
    """
    step = int(scalar(frame_step))
    signal = signal[..., None] if signal.ndim == 2 else signal
    if signal.ndim != 3 or signal.shape[2] not in (1, 2):
        raise KernelError(
            f"STFT: the signal has shape {list(signal.shape)}, but it must be [batch, samples] or "
            "[batch, samples, 1 or 2]"
        )
    if window is not None and window.ndim != 1:
        raise KernelError(f"STFT: the window has shape {list(window.shape)}, but it must have one axis")
    samples, size = signal.shape[1], signal.shape[1] if window is None else len(window)
    length = size if frame_length is None else int(scalar(frame_length))
    if step < 1 or not 1 <= length <= samples:
        raise KernelError(
            f"STFT: frames of {length} samples in steps of {step} are not possible in a signal of {samples} samples"
        )
    count, width = (samples - length) // step + 1, min(size, length)
    checked_shape(spec, (len(signal), count, length), 4 * 16)
    values = signal[..., 0] if signal.shape[2] == 1 else signal[..., 0] + 1j * signal[..., 1]
    frames = np.lib.stride_tricks.sliding_window_view(values, width, axis=1)[:, ::step][:, :count]
    spectrum = np.fft.fft(frames if window is None else frames * window[:width], n=length, axis=-1)
    half = spectrum[..., : length // 2 + 1] if onesided else spectrum
    return np.stack([half.real, half.imag], axis=-1).astype(signal.dtype)


# The weights of the terms of generalised cosine windows: w[0] - w[1] cos(x) + w[2] cos(2 x).
_WINDOWS = {"BlackmanWindow": (0.42, 0.5, 0.08), "HammingWindow": (25 / 46, 21 / 46), "HannWindow": (0.5, 0.5)}


@operator(*_WINDOWS, since_version=17)
def window(size: Any, *, periodic: bool = True, output_datatype: int = 1, spec: NodeSpec) -> Any:
    """Return a window of a length. A symmetric window is periodic with one step less."""
    (count,) = checked_shape(spec, [scalar(size)], 4 * 8)
    angles = 2 * np.pi * np.arange(count) / (count if periodic else count - 1)
    weights = enumerate(_WINDOWS[spec.op_type])
    return sum((-1) ** k * weight * np.cos(k * angles) for k, weight in weights).astype(dtype_of(output_datatype))


@operator("MelWeightMatrix", since_version=17)
def mel_weight_matrix(
    bands: Any, length: Any, rate: Any, low: Any, high: Any, *, output_datatype: int = 1, spec: NodeSpec
) -> Any:
    """Return [frequencies, bands]: a triangle over the frequencies per band, evenly spaced on the mel scale."""
    count, size, samples = int(scalar(bands)), int(scalar(length)), float(scalar(rate))
    if count < 1 or size < 1 or samples <= 0:
        raise KernelError(
            f"MelWeightMatrix: num_mel_bins is {count}, dft_length is {size} and sample_rate is {samples:g}, but "
            "all must be positive"
        )
    shape = checked_shape(spec, (size // 2 + 1, count), 2 * 8)
    checked_shape(spec, (size + count,), 8 * 8)
    first, last = (2595 * np.log10(1 + float(scalar(edge)) / 700) for edge in (low, high))
    mels = np.arange(count + 2) * ((last - first) / (count + 2)) + first
    edges = ((size + 1) * (700 * (10 ** (mels / 2595) - 1))) // samples
    if not (np.isfinite(edges).all() and edges.min() >= 0 and edges.max() < shape[0] + 1):
        raise KernelError(
            f"MelWeightMatrix: bands from {float(scalar(low)):g} to {float(scalar(high)):g} Hz exceed the range "
            f"of {shape[0]} frequency bins at a sample rate of {samples:g} Hz"
        )
    starts, centres, ends = (edges.astype(np.int64)[i : i + count] for i in range(3))
    result, rise, fall = np.zeros(shape), centres - starts, ends - centres
    rows, columns = _spans(starts, centres + 1)
    result[rows, columns] = np.where(rise[columns] > 0, (rows - starts[columns]) / np.maximum(rise[columns], 1), 1)
    rows, columns = _spans(centres, ends)
    result[rows, columns] = (ends[columns] - rows) / np.maximum(fall[columns], 1)
    return result.astype(dtype_of(output_datatype))


def _spans(begins: Any, ends: Any) -> tuple[Any, Any]:
    """Return the numbers from each begin up to its end, span after span, and the index of each number's span."""
    counts = np.maximum(ends - begins, 0)
    which = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + begins[which], which
