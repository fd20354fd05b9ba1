"""A page as a tree of elements, which fails at tags that do not match."""

from __future__ import annotations

from html.parser import HTMLParser
from xml.etree.ElementTree import Element, TreeBuilder

_VOID = {"meta", "input"}


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.builder = TreeBuilder()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute of {tag} is there twice"
        self.builder.start(tag, {name: value or "" for name, value in attrs})
        if tag in _VOID:
            self.builder.end(tag)
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag
            self.builder.end(tag)

    def handle_data(self, data: str) -> None:
        if self.open:
            self.builder.data(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def tree_of(page: str) -> Element:
    parser = _Builder()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser.builder.close()


def text_of(element: Element) -> str:
    return "".join(element.itertext())


def by_class(root: Element, name: str, tag: str = "*") -> list[Element]:
    return [each for each in root.iter(None if tag == "*" else tag) if name in each.get("class", "").split()]


def by_id(root: Element, ident: str) -> Element:
    (found,) = [each for each in root.iter() if each.get("id") == ident]
    return found
