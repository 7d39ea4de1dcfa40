"""The key file: what it says, errors that name line and field, fuzzed content, and reading it again."""

from __future__ import annotations

import hashlib
import logging
import os
import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.config import ServerConfig
from quire.errors import ConfigError
from quire.server.tenancy.key_file import MAX_BYTES, read_key_file
from quire.server.tenancy.tenants import Tenants

GOOD = """\
# Who may use the server.
[tenants.alice]
keys = ["alice-1", "sha256:{hashed}"]
weight = 3

[tenants."bob@example.com"]
keys = [
    "bob-1",  # a comment
]
admin = true
""".format(hashed=hashlib.sha256(b"alice-2").hexdigest())


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes) -> str:
        path = tmp_path / "keys.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(0o600)
        return str(path)

    return write


def test_keys_belong_to_their_tenants(write):
    tenants = Tenants("own-1 own-2", write(GOOD))
    found = {key: tenants.of_key(key.encode()) for key in ("alice-1", "alice-2", "bob-1", "own-1", "own-2")}
    names = ["alice", "alice", "bob@example.com", "default", "default"]
    assert [tenant.name for tenant in found.values()] == names
    assert found["alice-1"] is found["alice-2"]
    assert found["alice-1"].config.weight == 3
    assert [tenant.sees_all for tenant in found.values()] == [False, False, True, True, True]
    hashed = hashlib.sha256(b"alice-2").hexdigest()
    for wrong in (b"", b"alice", b"alice-1 ", f"sha256:{hashed}".encode(), hashed.encode()):
        assert tenants.of_key(wrong) is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "keys.toml: tenants: must be tables"),
        ("tenants = 3", "line 1: tenants: must be tables"),
        ("\n[tenant.a]\nkeys=['k']", "line 2: tenant: is unknown"),
        ("[tenants.a]\n", "line 1: tenants.a: needs keys"),
        ("[tenants.a]\n\nkeys = 'k'", "line 3: tenants.a.keys: needs keys, a list"),
        ("[tenants.a]\nkeys = []", "line 2: tenants.a.keys: needs keys, a list"),
        ("[tenants.a]\nkeys = ['k', '']", "line 2: tenants.a.keys: has a key (number 2) that is empty"),
        ("[tenants.a]\nkeys = ['k l']", "line 2: tenants.a.keys: has a key (number 1) that is empty or has"),
        ("[tenants.a]\nkeys = [7]", "line 2: tenants.a.keys: has a key (number 1) that is not a string"),
        ("[tenants.a]\nkeys = ['sha256:12']", "line 2: tenants.a.keys: has a key (number 1) that begins"),
        ("[tenants.a]\nkeys=['k']\n[tenants.b]\n\nkeys=['k']", "line 5: tenants.b.keys: has a key that 'a'"),
        ("[tenants.a]\nkeys=['k']\nwieght=3", "line 3: tenants.a.wieght: TenantConfig has no field 'wieght'"),
        ("[tenants.a]\nkeys=['k']\nweight=0", "line 3: tenants.a.weight: weight is 0; it must be"),
        ("[tenants.a]\nkeys=[\n'k']\nadmin='yes'", "line 4: tenants.a.admin: admin is 'yes'; it must be"),
        ("[tenants.a]\nkeys=['k']\nname='b'", "line 3: tenants.a.name: is given by"),
        ("[tenants.default]\nkeys=['k']", "line 1: tenants.default: is the tenant of the keys in api_key"),
        ("[tenants.'a:b']\nkeys=['k']", "line 1: tenants.a:b: is not a valid"),
        ("[tenants]\na = 3", "line 2: tenants.a: must be a table"),
        ("[tenants.a]\nkeys=['secret'", "is not valid TOML: "),
        ("[tenants.a]\nkeys=['k']\nkeys=['secret']\n", "is not valid TOML: see line 3"),
        (b"[tenants.a]\n\xff", "line 2: the file is not UTF-8"),
        ("x = " + "[" * 100_000, "is not valid TOML: "),
        ("#" * (MAX_BYTES + 1), f"has more than {MAX_BYTES} bytes"),
    ],
)
def test_errors_name_line_and_field_and_no_key(write, text, error):
    with pytest.raises(ConfigError) as caught:
        read_key_file(write(text))
    assert error in str(caught.value).replace("TenantConfig.", "")
    assert "secret" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, error in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        (pipe, "not a regular file"),
    ):
        with pytest.raises(ConfigError, match=error):
            read_key_file(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file("a\0b")


def test_others_who_can_read_the_file_are_warned_of(write, caplog):
    path = write(GOOD)
    read_key_file(path)
    assert not caplog.records
    os.chmod(path, 0o640)
    read_key_file(path)
    assert "mode 640" in caplog.text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
lines = st.sampled_from(
    ["[tenants.a]", "[tenants.b]", "keys = ['x']", "keys = ['x', 'y']", "keys = [", "]", "'z',", "weight = 2",
     "weight = nan", "weight = 1e400", "admin = 1979-05-27", "keys = [{a = 1}]", "cache_group = '''", "'''",
     "tenants.c.keys = ['w']", "a.b = 1", "[[tenants]]", "[tenants.a.keys]", "# x", "kv_transfer = true"]
)  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(lines, max_size=10).map("\n".join) | st.text(max_size=60) | st.binary(max_size=60))
def test_any_content_is_tenants_with_keys_or_one_error(write, text):
    path = write(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    try:
        file = read_key_file(path)
    except ConfigError as error:
        assert str(error)
        return
    with open(path, "rb") as opened:
        parsed = tomllib.load(opened)["tenants"]
    assert file.tenants.keys() == parsed.keys() == set(file.names.values())
    for name, table in parsed.items():
        for key in table["keys"]:
            assert file.names[hashlib.sha256(key.encode()).digest()] == name


async def test_a_changed_file_is_read_again_and_a_broken_one_is_not_taken(write, caplog):
    path = write(GOOD)
    tenants = Tenants("", path)
    alice = tenants.of_key(b"alice-1")
    write(GOOD.replace("alice-1", "alice-3").replace("weight = 3", "weight = 40.5"))
    await tenants.reload()
    assert tenants.of_key(b"alice-1") is None
    assert tenants.of_key(b"alice-3") is alice
    assert alice.config.weight == 40.5
    for broken in ("[tenants.alice]\nkeys = []", b"\xff", ""):
        caplog.clear()
        write(broken)
        await tenants.reload()
        assert "are unchanged" in caplog.text
        assert tenants.of_key(b"alice-3") is alice
    os.unlink(path)
    await tenants.reload()
    assert tenants.of_key(b"alice-3") is alice
    write(GOOD)
    with caplog.at_level(logging.WARNING):
        await tenants.reload()
    assert tenants.of_key(b"alice-1") is alice


async def test_the_file_is_only_read_when_it_has_changed_unless_that_is_forced(write, monkeypatch):
    tenants = Tenants("", write(GOOD))
    calls = []
    monkeypatch.setattr(
        "quire.server.tenancy.tenants.read_key_file", lambda path: calls.append(path) or read_key_file(path)
    )
    await tenants.reload()
    assert not calls
    await tenants.reload(is_forced=True)
    assert len(calls) == 1


@pytest.mark.parametrize("keys", [" ", "\t \n"])
def test_a_key_of_spaces_lets_nobody_in(keys):
    with pytest.raises(ConfigError, match="holds no key"):
        ServerConfig(api_key=keys)
