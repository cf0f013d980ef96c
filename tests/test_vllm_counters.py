"""The counters for Prometheus that vLLM's exporter has."""

import json
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace as Namespace

import pytest

from specdecode.integrations.adapters import Fallbacks
from specdecode.integrations.vllm import logger, reporting
from specdecode.integrations.vllm.reporting import Report
from tests.support.vllm import Clock, counted_output


@pytest.fixture
def client(monkeypatch):
    """A stand-in for prometheus_client, and what its counters have."""
    counts = Counter()

    class Count:
        def __init__(self, name, text, labels=()):
            assert name not in counts
            self.name, self.labels = name, lambda *values: Namespace(inc=lambda n: self.inc(n, *values))
            counts[name] = 0

        def inc(self, number, *labels):
            counts[(self.name, *labels) if labels else self.name] += number

    monkeypatch.setitem(sys.modules, "prometheus_client", Namespace(Counter=Count))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    reporting.prometheus.cache_clear()
    yield counts
    reporting.prometheus.cache_clear()


def test_counters_have_the_numbers_of_the_lines(client):
    report = Report(Fallbacks(logger), 60, counters=reporting.prometheus(), clock=Clock())
    assert reporting.prometheus() is report.counters  # two engines of a process share them
    for _ in range(2):
        report.verified(counted_output([2, 0], [3, 3]))
        report.left.add("watermarks", "")
        report.clock.now += 60
        report.tick()
        report.tick()
    assert client["specdecode:steps_verified"] == 2
    assert client["specdecode:accepted_tokens"] == 4
    assert client["specdecode:drafts"] == 4
    assert client[("specdecode:steps_left", "watermarks")] == 2


@pytest.mark.parametrize(("shared", "expected"), [(False, False), (True, True)])
def test_a_process_that_vllm_started_has_counters_only_if_the_exporter_reads_them(
    shared, expected, client, monkeypatch
):
    monkeypatch.setattr(reporting.multiprocessing, "parent_process", lambda: Namespace())
    if shared:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "anywhere")
    assert (reporting.prometheus() is not None) == expected


def test_without_prometheus_there_are_no_counters(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert reporting.prometheus() is None


def test_an_exporter_of_another_process_sees_the_counters(tmp_path):
    pytest.importorskip("prometheus_client")
    write = (
        "from collections import Counter; from specdecode.integrations.vllm.reporting import prometheus;"
        "prometheus()({'steps_verified': 3}, Counter(watermarks=2))"
    )
    read = (
        "import json; from prometheus_client import CollectorRegistry, multiprocess; registry = CollectorRegistry();"
        "multiprocess.MultiProcessCollector(registry); value = registry.get_sample_value;"
        "print(json.dumps([value('specdecode:steps_verified_total'),"
        " value('specdecode:steps_left_total', {'reason': 'watermarks'})]))"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for code in (write, write, read):
        run = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert json.loads(run.stdout) == [6, 4]
