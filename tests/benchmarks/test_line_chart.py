"""Where curves lie in an SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from line_chart import GAP, HEIGHT, LEFT, TOP, WIDTH, Panel, line_chart

pytestmark = pytest.mark.representative

SVG = "{http://www.w3.org/2000/svg}"


def test_each_panel_has_each_curve_at_its_place():
    curves = {"a < b": [(20.0, 0.0), (60.0, 50.0), (100.0, 100.0)], "c": [(20.0, 100.0), (100.0, 25.0)]}
    root = ElementTree.fromstring(
        line_chart([Panel("one", curves), Panel("two", curves)], [20, 100], "x", "y")
    )
    lines = [
        [tuple(float(number) for number in point.split(",")) for point in line.get("points").split()]
        for line in root.iter(f"{SVG}polyline")
    ]
    bottom, middle = TOP + HEIGHT, TOP + HEIGHT / 2
    for panel, left in enumerate((LEFT, LEFT + WIDTH + GAP)):
        assert lines[2 * panel] == [(left, bottom), (left + WIDTH / 2, middle), (left + WIDTH, TOP)]
        assert lines[2 * panel + 1] == [(left, TOP), (left + WIDTH, TOP + 0.75 * HEIGHT)]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"one", "two", "a < b", "c", "x", "y", "20", "100"} <= set(texts)
    assert texts.count("a < b") == 1
    width, height = (float(number) for number in root.get("viewBox").split()[2:])
    assert all(0 <= x <= width and 0 <= y <= height for line in lines for x, y in line)


def test_curves_differ_in_color_and_dashes():
    curves = {str(number): [(0.0, 1.0), (1.0, 1.0)] for number in range(6)}
    root = ElementTree.fromstring(line_chart([Panel("one", curves)], [0, 1], "x", "y"))
    lines = list(root.iter(f"{SVG}polyline"))
    assert len({(line.get("stroke"), line.get("stroke-dasharray")) for line in lines}) == 6
