"""The text of metrics is that of prometheus_client, whatever was written before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire.server.metrics.registry import TextWriter

NUMBERS = st.floats() | st.integers(0, 2**60)
LABELS = st.text(max_size=3) | st.sampled_from(['"', "\\", "\n", "\u2028", "a b 3"])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_it_is_what_the_library_writes(data):
    registry, writer = CollectorRegistry(), TextWriter()
    gauge = Gauge("a_gauge", "One\nwith \\ and 7", ["name", "other"], registry=registry)
    counter = Counter("a_counter", "Counts.", ["reason"], registry=registry)
    histogram = Histogram("a_histogram", "Seconds.", registry=registry, buckets=(0.1, 2.5))
    Gauge("without_samples", "None.", ["name"], registry=registry)
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 3))):
            gauge.labels(data.draw(LABELS), data.draw(LABELS)).set(data.draw(NUMBERS))
            counter.labels(data.draw(LABELS)).inc(data.draw(st.integers(0, 5)))
            histogram.observe(data.draw(st.floats(0, 4)))
        assert writer.write(list(registry.collect())) == generate_latest(registry)


def test_nothing():
    assert TextWriter().write([]) == b""


@pytest.mark.parametrize("name", ["vllm:cache_config_info", "vllm:lora_requests_info"])
async def test_what_routers_read_of_an_engine(http, name):
    text = (await http.get("/metrics")).text
    [line] = [line for line in text.splitlines() if line.startswith(name + "{")]
    expected = {
        "vllm:cache_config_info": 'block_size="16"',
        "vllm:lora_requests_info": 'max_lora="0",model_name="fake",running_lora_adapters=""',
    }
    assert expected[name] in line
