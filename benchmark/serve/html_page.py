"""Build one self-contained HTML page of results, which is readable on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# Each side of a page has its own colour by day and by night; a ninth has the first again.
COLOURS = {
    "first": ("#0b68b5", "#64b5f6"),
    "second": ("#c2410c", "#fb923c"),
    "third": ("#15803d", "#4ade80"),
    "fourth": ("#7e22ce", "#c084fc"),
    "fifth": ("#a16207", "#facc15"),
    "sixth": ("#be185d", "#f472b6"),
    "seventh": ("#0e7490", "#22d3ee"),
    "eighth": ("#4b5563", "#9ca3af"),
}
KINDS = tuple(COLOURS)
DAY, NIGHT = (" ".join(f"--{kind}: {each[n]};" for kind, each in COLOURS.items()) for n in (0, 1))
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #fff; --soft: #f3f5f7; --line: #c4cad0;
  --wait: #b9d4ea; --good: #15803d; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --paper: #14171a; --soft: #1f2429;
  --line: #4a535b; --wait: #2c4a63; --good: #4ade80; --bad: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 64rem; color: var(--ink); background: var(--paper);
  font: 16px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.pictures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0; } figcaption { font-size: .9rem; } svg { width: 100%; height: auto; }
.pass, .better { color: var(--good); } .refused, .worse { color: var(--bad); }
details { background: var(--soft); padding: .5rem 1rem; margin: .5rem 0; border-radius: .4rem; }
"""
STYLE += f":root {{ {DAY} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {NIGHT} }} }}\n"
STYLE += "\n".join(f".{kind} {{ color: var(--{kind}); }}" for kind in KINDS)


class Markup(str):
    """HTML that was made here, and not read from a file."""

    __slots__ = ()


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole document; `parts` are HTML."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are text, or Markup."""
    top = "".join(f"<th>{_cell(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{_cell(each)}</td>" for each in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def pictures(drawn: Iterable[tuple[str, str]]) -> str:
    """Return captions and SVG, as many side by side as there is room for."""
    figures = (f"<figure>{image}<figcaption>{escape(said)}</figcaption></figure>" for said, image in drawn)
    return '<div class="pictures">' + "\n".join(figures) + "</div>"


def marked(text: str, kind: str) -> Markup:
    """Return text of a kind that the style knows."""
    return Markup(f'<span class="{kind}">{escape(text)}</span>')


def folded(title: str, inner: str) -> str:
    """Return content that is folded until it is opened."""
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def _cell(text: str) -> str:
    return text if isinstance(text, Markup) else escape(text)
