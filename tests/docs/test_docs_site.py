"""The site that `make docs` builds has every page, the docstrings, a search, and nothing else."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.parallel import Parallel

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}

needs_sphinx = pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("furo") is None,
    reason="the extra docs is not installed",
)


@needs_sphinx
def test_the_contents_at_the_side_have_every_page_once():
    specification = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
    conf = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(conf)
    listed = re.findall(r"^([a-z].*)$", conf.contents((DOCS / "index.md").read_text()), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == PAGES - {"index"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return folder


@needs_sphinx
@pytest.mark.long
def test_the_site_has_every_page_and_no_generator(site):
    built = {str(page.relative_to(site).with_suffix("")) for page in site.rglob("*.html")}
    assert built >= PAGES
    assert not {path.name for path in site.rglob("*.py")} & {path.name for path in DOCS.rglob("*.py")}


@needs_sphinx
@pytest.mark.long
def test_the_search_knows_words_and_names_of_the_library(site):
    index = (site / "searchindex.js").read_text()
    for word in ("parallelize", "choose", "troubleshooting"):
        assert word in index.lower()
    reference = (site / "reference" / "api" / "layouts.html").read_text()
    assert 'id="shoal.parallel.Parallel.full_state_dict"' in reference
    words = (Parallel.full_state_dict.__doc__ or "").split()[:5]
    assert " ".join(words) in reference
