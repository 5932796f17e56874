"""A figure as SVG inside a page: themed by the page, small, and safe beside other pictures."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from moetune.reporting.theme import DARK

_GLYPH = re.compile(r'<path id="(DejaVuSans[\w-]*)"(?: d="([^"]*)")? transform="scale\(0\.015625\)"/>\s*')


@dataclass(frozen=True, slots=True)
class InlineSvg:
    """Markup of one picture; the outlines of its letters are apart, because all pictures of a page share them."""

    markup: str
    glyphs: Mapping[str, str]


def inline_svg(figure: Figure, prefix: str) -> InlineSvg:
    """Render without a background. ``prefix`` keeps the ids of several pictures apart.

    Every colour of the palette becomes the page's CSS variable. Text is drawn as outlines, so no word of a table can
    become markup, and the letters stand where the layout put them.
    """
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    glyphs = {found[1]: " ".join((found[2] or "").split()) for found in _GLYPH.finditer(svg)}
    svg = _GLYPH.sub("", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # nothing refers to a group
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = svg.replace("url(#", f"url(#{prefix}-").replace("xlink:href", "href")
    svg = re.sub(r'href="#(?!DejaVuSans)', f'href="#{prefix}-', svg)
    svg = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r"-?\d+\.\d{3,}(?=[ \",)\n])", _rounded, svg)
    for colour, (variable, _) in DARK.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r"<defs>\s*</defs>|<g/>", "", svg)
    return InlineSvg(re.sub(r"\s*\n\s*", "\n", svg), glyphs)


def glyph_sheet(pictures: Iterable[InlineSvg]) -> str:
    """Return the letters of all pictures, once; the page holds it before the first picture."""
    glyphs: dict[str, str] = {}
    for picture in pictures:
        glyphs |= picture.glyphs
    paths = "".join(f'<path id="{name}" d="{glyphs[name]}" transform="scale(0.015625)"/>' for name in sorted(glyphs))
    return f'<svg class="glyphs" aria-hidden="true" width="0" height="0"><defs>{paths}</defs></svg>'


def _rounded(found: re.Match[str]) -> str:
    """Keep a hundredth of a point; factors under one, such as a letter's scale, keep every digit."""
    value = float(found.group())
    return found.group() if abs(value) < 1 else f"{value:.2f}".rstrip("0").rstrip(".")
