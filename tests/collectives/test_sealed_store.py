"""Values of a sealed store: whoever lacks the secret can neither read them nor write some that are taken."""

from __future__ import annotations

import gc
import hmac
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from port_stand_ins import free_port
from torch.distributed.distributed_c10d import PrefixStore

from shoal.collectives.tcp_store import SealedStore, open_store, read_secret
from shoal.errors import CommunicationError, ConfigError

SECRET, OTHER = b"s" * 32, b"t" * 32


@given(st.text(max_size=20), st.binary(max_size=300), st.data())
def test_a_value_comes_back_and_a_changed_one_is_refused(key, value, data):
    inner = dist.HashStore()
    store = SealedStore(inner, SECRET)
    store.set(key, value)
    assert store.get(key) == value
    kept = bytearray(inner.get(key))
    if len(value) > 3:
        assert value not in kept
    kept[data.draw(st.integers(0, len(kept) - 1))] ^= data.draw(st.integers(1, 255))
    inner.set(key, bytes(kept))
    with pytest.raises(CommunicationError, match="SHOAL_SECRET_FILE"):
        store.get(key)


def test_values_of_strangers_of_other_keys_and_of_other_secrets_are_refused():
    inner = dist.HashStore()
    store = SealedStore(inner, SECRET)
    store.set("a", "value")
    inner.set("b", inner.get("a"))
    inner.set("c", "plain")
    SealedStore(inner, OTHER).set("d", "value")
    for key in "bcd":
        with pytest.raises(CommunicationError, match=f"the value '{key}'"):
            store.get(key)
    store.set("e", "value")
    assert inner.get("a") != inner.get("e")
    assert store.compare_set("f", "", "first") == b"first"
    assert store.compare_set("f", "", "second") == b"first"
    assert store.compare_set("f", "first", "third") == b"third"
    assert store.get("f") == b"third"


def test_values_are_sealed_as_the_standard_says():
    """RFC 8439, with a key of this use alone, and the value's name as associated data."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    inner = dist.HashStore()
    SealedStore(inner, SECRET).set("name", "value")
    sealed = inner.get("name")
    assert len(sealed) == 12 + len("value") + 16
    cipher = ChaCha20Poly1305(hmac.digest(SECRET, b"shoal store: values", "sha256"))
    assert cipher.decrypt(sealed[:12], sealed[12:], b"name") == b"value"


@pytest.mark.parametrize("size", [0, 11, 12, 27, 28])
def test_a_value_that_is_too_short_to_be_sealed_is_refused(size):
    inner = dist.HashStore()
    inner.set("key", bytes(size))
    with pytest.raises(CommunicationError, match="SHOAL_SECRET_FILE"):
        SealedStore(inner, SECRET).get("key")


def test_without_the_package_the_secret_is_refused_by_name(monkeypatch, tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    for name in [each for each in sys.modules if each.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match="SHOAL_SECRET_FILE needs the package 'cryptography'"):
        open_store(
            ("127.0.0.1", free_port()),
            0,
            1,
            timedelta(seconds=30),
            {"SHOAL_SECRET_FILE": str(tmp_path / "secret")},
        )


SHORT = timedelta(milliseconds=1)
CALLS = st.one_of(
    st.tuples(st.just("set"), st.sampled_from("ab"), st.sampled_from("xyz")),
    st.tuples(st.just("get"), st.sampled_from("ab")),
    st.tuples(st.just("compare_set"), st.sampled_from("ab"), st.sampled_from(("", "x", "y")), st.just("z")),
    st.tuples(st.just("delete_key"), st.sampled_from("ab")),
    st.tuples(st.just("add"), st.just("n"), st.integers(0, 3)),
    st.tuples(st.just("check"), st.lists(st.sampled_from("abn"), min_size=1)),
    st.tuples(st.just("wait"), st.lists(st.sampled_from("abn"), min_size=1), st.just(SHORT)),
    st.tuples(st.just("num_keys")),
)


@given(st.lists(CALLS, max_size=12))
def test_through_a_prefix_it_answers_as_a_plain_store(calls):
    """As native code calls it: that looks for methods by names of its own."""
    plain, sealed = dist.HashStore(), SealedStore(dist.HashStore(), SECRET)
    stores = [PrefixStore("group", each) for each in (plain, sealed)]
    for store in stores:
        store.set_timeout(SHORT)

    def answer(store, name, *arguments):
        try:
            return getattr(store, name)(*arguments)
        except dist.DistStoreError:
            return "not there"

    for call in calls:
        assert answer(stores[0], *call) == answer(stores[1], *call), call
    assert answer(stores[0].clone(), "check", ["a"]) == answer(stores[1].clone(), "check", ["a"])


def test_a_secret_that_others_can_read_or_that_is_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    environment = {"SHOAL_SECRET_FILE": str(path)}
    assert read_secret({}) is None
    for content, mode, told in [
        (None, 0, "cannot be read"),
        (SECRET, 0o640, "others can read it"),
        (b"short", 0o600, "has 5 bytes"),
        (bytes(5000), 0o600, "has more than 4096 bytes"),
    ]:
        if content is not None:
            path.write_bytes(content)
            path.chmod(mode)
        with pytest.raises(ConfigError, match=told):
            read_secret(environment)
    path.write_bytes(SECRET)
    assert read_secret(environment) == SECRET


def sum_over(backend: str, port: int, secret: str) -> float:
    """Form a group of these ranks over a store with a secret, and sum their numbers."""
    rank, ranks, limit = dist.get_rank(), dist.get_world_size(), timedelta(seconds=30)
    dist.destroy_process_group()
    store = open_store(("127.0.0.1", port), rank, ranks, limit, {"SHOAL_SECRET_FILE": secret})
    assert isinstance(store, SealedStore)
    dist.init_process_group(
        backend, store=PrefixStore("default", store), rank=rank, world_size=ranks, timeout=limit
    )
    del store  # the group keeps it
    gc.collect()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    return float(total)


@pytest.mark.parametrize("backend", ["shoal", "gloo"])
def test_groups_form_over_a_sealed_store(ranks, backend, tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    assert ranks.run(sum_over, 2, backend, free_port(), str(tmp_path / "secret")) == [3.0, 3.0]
