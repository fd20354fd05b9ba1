"""HTML and SVG as text that is escaped once, whatever it contains."""

from __future__ import annotations

import html
import math
import re

_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that neither UTF-8 nor XML can have."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(value: object) -> Markup:
    """Return a value as markup; text is escaped unless it is markup."""
    return value if isinstance(value, Markup) else Markup(html.escape(_NOT_IN_XML.sub("�", str(value))))


def joined(*parts: object) -> Markup:
    return Markup("".join(map(escaped, parts)))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Return an element. Attributes that are None are left out; `cls` is `class`, and `data_r` is `data-r`."""
    found = "".join(
        f' {"class" if key == "cls" else key.replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{found}>{joined(*children)}</{name}>")


def number(value: object, digits: int = 4) -> str:
    """Return a value for people: numbers with so many digits, `1.5e-7` for very small and large ones."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    if isinstance(value, int) and value.bit_length() > 1000:
        return str(value)
    if math.isnan(value) or math.isinf(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 10**9:
        return str(int(value))
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
        return f"{_without_zeros(mantissa)}e{int(exponent)}"
    return _without_zeros(f"{value:.{digits}g}") if round(abs(value)) < 10**digits else str(round(value))


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


# -- parts of a page

Section = tuple[str, str, Markup]
"""Its id on the page, its name in the navigation, and its content."""


def section(ident: str, name: str, *parts: object, title: object = None) -> Section:
    heading = tag("h2", name if title is None else title, id=f"{ident}-title")
    return ident, name, tag("section", heading, *parts, id=ident, aria_labelledby=f"{ident}-title")


def figure(caption: object, *parts: object) -> Markup:
    return tag("figure", tag("figcaption", tag("span", caption)), *parts)


def scrolling(name: str, *children: object, cls: str = "") -> Markup:
    """Return a part that scrolls sideways on a narrow screen, with the keyboard too."""
    return tag("div", *children, cls=f"scroll {cls}".strip(), tabindex="0", role="region", aria_label=name)
