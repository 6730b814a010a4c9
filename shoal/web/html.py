"""The HTML around a page: heading, navigation, and the script that draws it. Nothing of a run is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from shoal.web.pages import PAGES, Page

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The content security policy: no inline script or style, and no script can make HTML from text."""


def page_html(
    page: Page,
    *,
    address: Callable[[str], str],
    scripts: str,
    pages: Iterable[Page] = tuple(PAGES.values()),
    extra: str = "",
) -> str:
    """Return a page without its data.

    Args:
        page: The page.
        address: Returns the address of another page, by its name.
        scripts: Elements of the head that load style and scripts.
        pages: The pages of the navigation.
        extra: Elements at the end of the body, such as inlined data.
    """
    links = "\n".join(
        f'<li><a href="{escape(address(each.name))}"{_current(each, page)}>{escape(each.label)}</a></li>'
        for each in pages
    )
    return f"""<!doctype html>
<html lang="en" data-page="{page.name}" data-needs-run="{"yes" if page.needs_run else "no"}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(page.title)} - Shoal</title>
<meta name="description" content="{escape(page.lead)}">
{scripts}
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header>
<p class="brand"><span aria-hidden="true" class="fish">&gt;&lt;&gt;</span> Shoal</p>
<nav aria-label="Pages"><ul>
{links}
</ul></nav>
<div id="tools"></div>
</header>
<main id="main" tabindex="-1">
<h1>{escape(page.title)}</h1>
<p class="lead">{escape(page.lead)}</p>
<p id="status" role="status">Loading.</p>
<div id="page"></div>
<noscript><p>This page draws with JavaScript, which is off here.</p></noscript>
</main>
{extra}
</body>
</html>
"""


def message_page(title: str, text: str, *, refresh: str = "") -> str:
    """Return a page with one message, such as an error; with `refresh`, it goes on to an address at once."""
    meta = f'<meta http-equiv="refresh" content="0;url={escape(refresh)}">' if refresh else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{meta}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title>"
        f"</head><body><main><h1>{escape(title)}</h1><p>{escape(text)}</p></main></body></html>\n"
    )


def _current(each: Page, page: Page) -> str:
    return ' aria-current="page"' if each is page else ""
