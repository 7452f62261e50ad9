"""scikit-learn, LightGBM and XGBoost models, fitted to scikit-learn's own data, for comparisons of sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _pipelines() -> dict[str, Callable[[], Any]]:
    from lightgbm import LGBMClassifier, LGBMRegressor
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA, TruncatedSVD
    from sklearn.ensemble import (
        AdaBoostClassifier,
        ExtraTreesClassifier,
        GradientBoostingClassifier,
        IsolationForest,
        RandomForestClassifier,
        RandomForestRegressor,
        StackingClassifier,
        VotingClassifier,
    )
    from sklearn.feature_selection import SelectKBest
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.linear_model import ElasticNet, LogisticRegression, Ridge, SGDClassifier
    from sklearn.naive_bayes import GaussianNB
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline, make_union
    from sklearn.preprocessing import KBinsDiscretizer, MinMaxScaler, Normalizer, PolynomialFeatures, StandardScaler
    from sklearn.svm import SVC, OneClassSVM
    from sklearn.tree import DecisionTreeRegressor
    from xgboost import XGBClassifier, XGBRegressor

    logistic = LogisticRegression(max_iter=500)
    return {
        "adaboost": lambda: AdaBoostClassifier(n_estimators=5),
        "boosting": lambda: GradientBoostingClassifier(n_estimators=10),
        "bins": lambda: make_pipeline(KBinsDiscretizer(4, encode="ordinal"), logistic),
        "elastic_net": lambda: make_pipeline(PolynomialFeatures(2), ElasticNet()),
        "extra_trees": lambda: ExtraTreesClassifier(10, max_depth=5),
        "forest": lambda: RandomForestRegressor(5, max_depth=4),
        "forest_classes": lambda: RandomForestClassifier(10, max_depth=5),
        "gaussian_process": lambda: GaussianProcessRegressor(),
        "isolation_forest": lambda: IsolationForest(n_estimators=5),
        "kmeans": lambda: make_pipeline(MinMaxScaler(), KMeans(3, n_init=1)),
        "lightgbm": lambda: LGBMClassifier(n_estimators=8, verbose=-1),
        "lightgbm_values": lambda: LGBMRegressor(n_estimators=8, verbose=-1),
        "logistic": lambda: make_pipeline(StandardScaler(), logistic),
        "naive_bayes": lambda: GaussianNB(),
        "neighbours": lambda: make_pipeline(StandardScaler(), KNeighborsClassifier(3)),
        "network": lambda: make_pipeline(StandardScaler(), MLPClassifier((8, 8), max_iter=50)),
        "one_class": lambda: OneClassSVM(),
        "ridge": lambda: make_pipeline(Normalizer(), Ridge()),
        "selection": lambda: make_pipeline(SelectKBest(k=3), logistic),
        "stacking": lambda: StackingClassifier([("a", GaussianNB()), ("b", logistic)]),
        "stochastic": lambda: make_pipeline(StandardScaler(), SGDClassifier(loss="log_loss")),
        "svm": lambda: make_pipeline(StandardScaler(), SVC()),
        "tree": lambda: DecisionTreeRegressor(max_depth=5),
        "union": lambda: make_pipeline(make_union(PCA(2), TruncatedSVD(2)), logistic),
        "voting": lambda: VotingClassifier(
            [("a", GaussianNB()), ("b", logistic)], voting="soft", flatten_transform=False
        ),
        "xgboost": lambda: XGBClassifier(n_estimators=8),
        "xgboost_values": lambda: XGBRegressor(n_estimators=8),
    }


def names() -> list[str]:
    """Return the names that `exported` accepts."""
    return list(_pipelines())


def exported(name: str) -> tuple[bytes, dict[str, Any]]:
    """Return the model as ONNX, and its input rows."""
    import numpy as np
    from sklearn.datasets import load_breast_cancer, load_iris

    load = load_breast_cancer if "boost" in name or "lightgbm" in name else load_iris
    rows, kinds = load(return_X_y=True)
    estimator = _pipelines()[name]()
    targets = kinds / 2 if _predicts_values(name) else kinds
    np.random.seed(0)  # noqa: NPY002 - scikit-learn uses this generator for models without a seed
    estimator.fit(rows.astype(np.float32), targets)
    given = rows[::7].astype(np.float32)
    return converted(estimator, given), {"X": given}


def _predicts_values(name: str) -> bool:
    return name.endswith("values") or name in ("elastic_net", "forest", "gaussian_process", "ridge", "tree")


def converted(estimator: Any, rows: Any) -> bytes:
    """Return the estimator as ONNX; XGBoost and LightGBM need separate converters."""
    from skl2onnx import to_onnx

    kind = type(estimator).__module__.split(".")[0]
    if kind in ("xgboost", "lightgbm"):
        from onnxmltools import convert_lightgbm, convert_xgboost
        from onnxmltools.convert.common.data_types import FloatTensorType

        convert = convert_xgboost if kind == "xgboost" else convert_lightgbm
        model = convert(estimator, initial_types=[("X", FloatTensorType([None, rows.shape[1]]))])
    else:
        # Probabilities are arrays. Only in pipelines are they maps.
        plain = hasattr(estimator, "predict_proba") and not hasattr(estimator, "steps")
        options = {id(estimator): {"zipmap": False}} if plain else None
        model = to_onnx(estimator, rows[:1], options=options, target_opset={"": 18, "ai.onnx.ml": 3})
    data: bytes = model.SerializeToString()
    return data
