"""Reads a report back: balanced tags, ids, tables with their values, text, and what a browser would fetch."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input", "area", "base", "col", "embed", "source", "track", "wbr"}
FETCHING = ("src", "href", "srcset", "data", "action", "poster", "background", "xlink:href")


class Reader(HTMLParser):
    """Attributes: ``errors``, ``ids``, ``links`` (tag, attribute, value), ``tables`` {id: rows of (text, value)}."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.errors: list[str] = []
        self.ids: list[str] = []
        self.links: list[tuple[str, str, str]] = []
        self.tables: dict[str, list[list[tuple[str, str | None]]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self._table: str | None = None
        self._body = False
        self.feed(html)
        self.close()
        self.errors += [f"<{tag}> is not closed" for tag in self._open]

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append((tag, given))
        if "id" in given:
            self.ids.append(given["id"])
        self.links += [(tag, name, given[name]) for name in FETCHING if given.get(name)]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self._table = given["id"]
            self.tables[self._table] = []
        if tag == "tbody":
            self._body = True
        if self._body and tag == "tr":
            self.tables[self._table].append([])
        if self._body and tag in ("td", "th"):
            self.tables[self._table][-1].append(("", given.get("data-value")))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        if not self._open or self._open[-1] != tag:
            self.errors.append(
                f"line {self.getpos()[0]}: </{tag}> closes <{self._open[-1] if self._open else 'nothing'}>"
            )
        if tag in self._open:
            while self._open.pop() != tag:
                pass
        if tag == "tbody":
            self._body = False

    def handle_data(self, data):
        if not self._open or self._open[-1] not in ("style", "script"):
            self.text += data
        if self._body and self._table is not None and self.tables[self._table] and self.tables[self._table][-1]:
            text, value = self.tables[self._table][-1][-1]
            self.tables[self._table][-1][-1] = (text + data, value)
