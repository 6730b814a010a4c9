"""Pages for a browser: a run while it is written, its timeline, and pictures that teach.

Nouns: Page (a name, a title, and the function that gives its data), Folder (the runs that are shown). `serve`
answers browsers of this machine that have the token; `export` writes the pages as files. Scripts and style
are in `static/`: modules without a build step, which make no HTML from text. Called by `shoal web`.
"""

from shoal.web.app import Folder, is_loopback, serve
from shoal.web.export import export
from shoal.web.pages import PAGES, Page

__all__ = ["PAGES", "Folder", "Page", "export", "is_loopback", "serve"]
