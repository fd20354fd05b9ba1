"""Whatever a text contains, it is text on the page; and numbers as people write them."""

from __future__ import annotations

import math
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as some

from mgpu_slurm.reports.page.markup import Markup, escaped, joined, number, scrolling, section, tag


class Parsed(HTMLParser):
    """What a browser makes of markup."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data


TEXT = some.text(some.characters(exclude_categories=["Cs", "Cc", "Cn"])) | some.text("<>&\"'/=; \nscripttd", min_size=1)


@given(TEXT, TEXT)
def test_text_and_attributes_stay_what_they_are(text: str, attribute: str) -> None:
    parsed = Parsed(tag("b", text, joined(text), cls=attribute, data_v=attribute))
    assert parsed.tags == [("b", {"class": attribute, "data-v": attribute})]
    assert parsed.text == text * 2


def test_markup_is_escaped_once() -> None:
    inner = tag("i", "a & b", title=None)
    assert inner == "<i>a &amp; b</i>"
    assert tag("p", inner, " < ", 3) == "<p><i>a &amp; b</i> &lt; 3</p>"
    assert escaped(Markup("<hr>")) == "<hr>"
    assert not isinstance(inner + "<", Markup)
    ident, name, part = section("s", "A & B", title=Markup("<code>x</code>"))
    assert (ident, name) == ("s", "A & B")
    assert part == '<section id="s" aria-labelledby="s-title"><h2 id="s-title"><code>x</code></h2></section>'
    assert 'tabindex="0" role="region" aria-label="&lt;T&gt;"' in scrolling("<T>")


@given(some.floats(-1e300, 1e300))
def test_number_is_the_value_to_its_digits(value: float) -> None:
    text = number(value)
    assert math.isclose(float(text), value, rel_tol=5.1e-3 if "e" in text else 5.1e-4, abs_tol=1e-320)
    assert len(text) <= 10
    if 1e-3 <= abs(value) < 1e6:
        assert "e" not in text


@given(some.integers())
def test_whole_number(value: int) -> None:
    assert float(number(value)) == value or abs(value) >= 10**6


def test_numbers() -> None:
    numbers = (0.1 + 0.2, 12345.6, 9999.6, 1e-7, 1.5e12, 123456, -0.0, 0.00099999)
    assert [number(each) for each in numbers] == ["0.3", "12346", "10000", "1e-7", "1.5e12", "123456", "0", "1e-3"]
    assert [number(each) for each in (None, True, "<a>", math.nan, -math.inf)] == ["", "True", "<a>", "nan", "-inf"]
    assert number(10**400).startswith("1")
    assert number(0.123456, 2) == "0.12"


def test_characters_that_no_page_can_have_are_replaced() -> None:
    assert tag("b", "a\x00\x1b\ud800\uffff\tü\n") == "<b>a\ufffd\ufffd\ufffd\ufffd\tü\n</b>"
