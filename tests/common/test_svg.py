"""Plots of points: labels at their points, and a legend with marks."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from genai.common.svg import Bars, Scatter, Series

NAMESPACE = "{http://www.w3.org/2000/svg}"


def crowded() -> ElementTree.Element:
    points = [(4.77, 0.0102), (4.77, 0.0112), (4.77, 0.0036), (4.77, 0.0029), (4.6, 0.0044), (8.6, 3e-5), (4.45, 0.006)]
    series = [
        Series("output", [(x, y, f"variant-{index}") for index, (x, y) in enumerate(points)]),
        Series("predicted", [(x / 2, 10.0 ** (-x / 4), "") for x in range(6, 16)], line=True),
    ]
    return ElementTree.fromstring(Scatter("KLD", "bits", "nats", series).svg())


def test_labels_are_apart_and_near_their_points() -> None:
    plot = crowded()
    circles = {
        str(circle.findtext(f"{NAMESPACE}title")): (float(circle.attrib["cx"]), float(circle.attrib["cy"]))
        for circle in plot.iter(f"{NAMESPACE}circle")
        if circle.find(f"{NAMESPACE}title") is not None
    }
    boxes, lines = [], plot.findall(f"{NAMESPACE}line")
    for text in plot.iter(f"{NAMESPACE}text"):
        if not re.fullmatch(r"variant-\d", text.text or ""):
            continue
        width, anchor = 7 * len(text.text or ""), text.attrib["text-anchor"]
        left = float(text.attrib["x"]) - {"start": 0.0, "middle": width / 2, "end": float(width)}[anchor]
        middle, (x, y) = float(text.attrib["y"]) - 4, circles[str(text.text)]
        assert left >= 79.9 and left + width <= 860
        gap = max(left - x, x - left - width, 0) + max(abs(middle - y) - 7, 0)
        joined = any((float(one.attrib["x1"]), float(one.attrib["y1"])) == (x, y) for one in lines)
        assert gap <= 9 or joined, "a label away from its point has a line to the point"
        boxes.append((left, middle - 6, left + width, middle + 6))
    assert len(boxes) == 7
    for index, a in enumerate(boxes):
        assert not any(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] - 0.1 and b[1] < a[3] - 0.1 for b in boxes[:index])
        assert not any(a[0] < x < a[2] and a[1] < y < a[3] for x, y in circles.values())


def test_the_legend_has_marks() -> None:
    plot = crowded()
    legend = [text.text for text in plot.iter(f"{NAMESPACE}text") if float(text.attrib["x"]) == 700]
    assert legend == ["output", "predicted"]
    assert [circle.attrib["cy"] for circle in plot.iter(f"{NAMESPACE}circle") if circle.attrib["cx"] == "682"] == ["48"]
    assert any(line.attrib["x1"] == "670" and line.attrib["x2"] == "694" for line in plot.iter(f"{NAMESPACE}line"))


def test_plots_without_values() -> None:
    assert "no values above 0" in Scatter("t", "x", "y", [Series("a", [(1, 0, "b")])]).svg()
    assert "inf" in Bars("t", [("a", float("inf"))]).svg()
