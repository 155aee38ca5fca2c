"""SVG: well formed, and marks lie where values are."""

import xml.etree.ElementTree as ET

import pytest

from decodefleet.cluster.simulate.chart import INNER_HEIGHT, INNER_WIDTH, LEFT, TOP, Panel, Series, chart


def marks(picture: str, tag: str):
    return [one for one in ET.fromstring(picture).iter() if one.tag.endswith(tag)]


def test_points_lie_where_values_are():
    picture = chart([Panel("t", "x", [Series("a", [0, 5, 10], [0, 30, 60], "points")])])
    places = [(float(one.get("cx")), float(one.get("cy"))) for one in marks(picture, "circle")]
    assert places[0] == (LEFT, TOP + INNER_HEIGHT)
    assert places[1] == pytest.approx((LEFT + INNER_WIDTH / 2, TOP + INNER_HEIGHT / 2))
    assert places[2] == (LEFT + INNER_WIDTH, TOP)


def test_log_axis():
    picture = chart([Panel("t", "x", [Series("a", [0, 1, 2], [1, 10, 100])], log=True)])
    (line,) = marks(picture, "polyline")
    heights = [float(pair.split(",")[1]) for pair in line.get("points").split()]
    assert heights == pytest.approx([TOP + INNER_HEIGHT, TOP + INNER_HEIGHT / 2, TOP], abs=0.1)


def test_stairs_hold_a_value_until_the_next():
    picture = chart([Panel("t", "x", [Series("a", [0, 5, 10], [0, 10, 0], "steps")])])
    (line,) = marks(picture, "polyline")
    assert len(line.get("points").split()) == 5


def test_names_are_escaped():
    assert "a &lt; b" in chart([Panel("t", "x", [Series("a < b", [0, 1], [0, 1])])])
