"""Compressed bodies are served, and a bomb is refused before it is made."""

import functools
import gzip
import json
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import MAX_BODY_BYTES

from quire.errors import InvalidRequestError
from quire.server.wire.bodies import Decompressor

BODY = json.dumps({"model": "fake", "prompt": "Hi"}).encode()


def raw_deflate(data):
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


gzipped = functools.partial(gzip.compress, mtime=0)  # names of cases have no time of day
ENCODERS = [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate)]


async def post(http, content, encoding):
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    return await http.post("/v1/completions", content=content, headers=headers)


@pytest.mark.parametrize(("encoding", "compress"), ENCODERS)
async def test_compressed_bodies(http, encoding, compress):
    response = await post(http, compress(BODY), encoding)
    assert response.status_code == 200, response.text


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(("encoding", "compress"), ENCODERS)
async def test_a_bomb(http, encoding, compress):
    bomb = compress(b" " * 100 * MAX_BODY_BYTES)
    assert len(bomb) < MAX_BODY_BYTES
    tracemalloc.start()
    response = await post(http, bomb, encoding)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert peak < 5 * MAX_BODY_BYTES


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (BODY, "not valid gzip"),
        (b"", "ends too early"),
        (gzipped(BODY)[:-1], "ends too early"),
        (gzipped(BODY) + b"x", "follows its end"),
        (gzipped(BODY) + gzipped(b""), "follows its end"),
        (gzipped(BODY)[:-8] + b"\0" * 8, "not valid gzip"),
    ],
)
async def test_bodies_that_are_not_what_they_say(http, content, words):
    response = await post(http, content, "gzip")
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_other_encodings(http):
    for encoding in ("zstd", "br", "gzip, gzip"):
        response = await post(http, BODY, encoding)
        assert response.status_code == 415
        assert "gzip, deflate" in response.json()["error"]["message"]


@given(st.binary(max_size=300), st.sampled_from(ENCODERS), st.integers(1, 40), st.integers(0, 300))
def test_any_chunks(data, encoder, size, limit):
    encoding, compress = encoder
    compressed = compress(data)
    stream = Decompressor(encoding, limit)
    made = b"".join(stream.decompress(compressed[i : i + size]) for i in range(0, len(compressed), size))
    assert made == data[: limit + 1]
    if len(data) <= limit:
        stream.finish()


@given(st.binary(min_size=1, max_size=100), st.sampled_from(["gzip", "deflate"]))
def test_any_bytes(data, encoding):
    stream = Decompressor(encoding, 1000)
    try:
        assert len(stream.decompress(data)) <= 1001
    except InvalidRequestError as error:
        assert "not valid" in str(error)
