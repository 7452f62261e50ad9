"""Writes the small exported models that tests keep: `python -m tools.session_goldens`.

Each is a model of random weights with inputs and onnxruntime's outputs beside it (tests/session/models). Needs torch,
transformers, scikit-learn, skl2onnx and onnxruntime.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tools.session_agreement import MODELS, export

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "session" / "models"
TRANSFORMERS = ("bert", "vit", "resnet")


def sklearn_models() -> dict[str, tuple[Any, Any]]:
    """Fitted estimators and some rows, by name."""
    from sklearn.datasets import load_breast_cancer, load_iris
    from sklearn.ensemble import GradientBoostingClassifier, RandomForestRegressor
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    iris, kinds = load_iris(return_X_y=True)
    cancer, malign = load_breast_cancer(return_X_y=True)
    fitted: dict[str, Callable[[], tuple[Any, Any]]] = {
        "boosting": lambda: (GradientBoostingClassifier(n_estimators=10).fit(cancer, malign), cancer),
        "forest": lambda: (RandomForestRegressor(5, max_depth=4).fit(iris, kinds / 2), iris),
        "logistic": lambda: (make_pipeline(StandardScaler(), LogisticRegression()).fit(iris, kinds), iris),
        "svm": lambda: (make_pipeline(StandardScaler(), SVC()).fit(iris, kinds), iris),
    }
    return {name: make() for name, make in fitted.items()}


def save(name: str, model: bytes, feed: dict[str, Any]) -> None:
    """Write a model, its inputs and onnxruntime's outputs (those that are arrays)."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model)
    outputs = dict(zip((item.name for item in session.get_outputs()), session.run(None, feed), strict=True))
    arrays = {f"output {key}": value for key, value in outputs.items() if isinstance(value, np.ndarray)}
    (FOLDER / f"{name}.onnx").write_bytes(model)
    np.savez_compressed(FOLDER / f"{name}.npz", **{f"input {key}": value for key, value in feed.items()}, **arrays)


def main() -> None:
    """Write all of them."""
    from skl2onnx import to_onnx

    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    warnings.simplefilter("ignore")
    FOLDER.mkdir(exist_ok=True)
    MODELS["bert"] = ("text", {**MODELS["bert"][1], "max_position_embeddings": 16})
    for model_type in TRANSFORMERS:
        path, feed = export(model_type, FOLDER)
        save(model_type, path.read_bytes(), feed)
    for name, (estimator, rows) in sklearn_models().items():
        given = rows[::7].astype(np.float32)
        save(name, to_onnx(estimator, given[:1]).SerializeToString(), {"X": given})


if __name__ == "__main__":
    main()
