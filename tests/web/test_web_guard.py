"""Who may read the pages of `shoal web`."""

import re

import pytest
from starlette.testclient import TestClient

from shoal.web.app import STATIC, Folder, make_app
from shoal.web.pages import PAGES

TOKEN = "a-token"
HOST = "127.0.0.1:8000"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def client(run):
    app = make_app(Folder(run.path), TOKEN, frozenset({HOST}), cookie="shoal-8000")
    return TestClient(app, base_url=f"http://{HOST}", follow_redirects=False)


def addresses():
    return ["/", "/runs", "/events", *(f"/{name}" for name in PAGES), *(f"/data/{name}" for name in PAGES)]


@pytest.mark.parametrize("headers", [{}, {"cookie": "shoal-8000=wrong"}, {"authorization": "Bearer wrong"}])
def test_without_the_token_nothing_is_told(client, headers):
    for address in [*addresses(), "/static/live.js", "/static/none", "/none"]:
        answer = client.get(address, headers=headers)
        assert answer.status_code == 403
        assert "tiny" not in answer.text


def test_a_wrong_token_in_the_address_sets_no_cookie(client):
    answer = client.get("/live?token=wrong")
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


def test_the_token_in_the_address_becomes_a_cookie_that_scripts_and_other_sites_do_not_have(client):
    answer = client.get(f"/?token={TOKEN}")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in answer.text, "the next address is without the token"
    assert client.get("/live").status_code == 200  # with the cookie


def test_a_token_sends_nobody_to_another_site(client):
    answer = client.get(f"//evil.example/%5Cevil.example?token={TOKEN}")
    assert re.findall(r'url=([^"]*)', answer.text)[0].startswith("/evil.example")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1", "127.0.0.1:80", ""])
def test_a_name_that_is_not_this_server_gets_nothing_even_with_the_token(client, host):
    answer = client.get("/data/live", headers={**BEARER, "host": host})
    assert answer.status_code == 421
    assert "loss" not in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9000"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    ],
)
def test_a_page_of_another_site_gets_nothing_even_with_the_token(client, headers):
    assert client.get("/data/live", headers={**BEARER, **headers}).status_code == 403


def test_its_own_pages_get_data(client):
    answer = client.get(
        "/data/live", headers={**BEARER, "origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}
    )
    assert answer.json()["run"]["name"] == "tiny"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_pages_are_only_read(client, method):
    assert client.request(method, "/data/live", headers=BEARER).status_code == 405


@pytest.mark.parametrize(
    "address", ["/live", "/data/live", "/static/live.js", "/none", "/data/live?measure=x"]
)
@pytest.mark.parametrize("headers", [BEARER, {}])
def test_every_answer_forbids_inline_scripts_frames_and_other_readers(client, address, headers):
    answer = client.get(address, headers=headers)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"


def test_pages_hold_no_inline_script_style_or_handler(client):
    for name in PAGES:
        text = client.get(f"/{name}", headers=BEARER).text
        assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|https?://", text)


def test_scripts_make_no_html_from_text_and_load_nothing_from_elsewhere():
    for file in STATIC.iterdir():
        if file.name.endswith((".js", ".css")):
            text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|https?://|@import|url\("
            assert not re.search(forbidden, text), file.name


@pytest.mark.parametrize(
    "name", ["../guard.py", "..%2fguard.py", "%2e%2e/guard.py", "style.css/..", "guard.py", "."]
)
def test_only_static_files_are_given(client, name):
    assert client.get(f"/static/{name}", headers=BEARER).status_code in (303, 404)


@pytest.mark.parametrize("name", ["../tiny", "..", "/etc", "tiny/../tiny", "none"])
def test_only_runs_of_the_folder_open(client, name):
    answer = client.get("/data/live", params={"run": name}, headers=BEARER)
    assert answer.status_code == 400
    assert "there is no run" in answer.json()["error"]
