"""Numbers of a live look, out of what servers and nvidia-smi print; gauges for Prometheus; a host at a glance."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from ddtree_ops.doctor.glance import age, row_of
from ddtree_ops.doctor.live import Now, combine, parse_smi
from ddtree_ops.errors import Failed
from ddtree_ops.remote.metrics import fetch, parse_metrics, total

from .recorded import healthy_case, sick_case

METRICS = """\
# HELP sglang:spec_accept_length Mean acceptance length
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="m, \\"x\\" } y",tp_rank="0"} 4.25
sglang:gen_throughput{model_name="m",dp_rank="0"} 100.0
sglang:gen_throughput{model_name="m",dp_rank="1"} 20.5 1790000000000
sglang:num_running_reqs{model_name="m"} 3
sglang:num_queue_reqs{model_name="m"} NaN
sglang:generation_tokens_total{model_name="m"} 1.2e+03
up 1
"""


def test_metrics_as_servers_print_them() -> None:
    found = parse_metrics(METRICS)
    assert found["sglang:spec_accept_length"] == [4.25] and found["up"] == [1]
    assert total(found, "sglang:gen_throughput") == 120.5
    assert total(found, "sglang:generation_tokens") == total(found, "sglang:generation_tokens_total") == 1200
    assert total(found, "sglang:num_queue_reqs") is None


@pytest.mark.parametrize(
    "text", ["", "\x00\xff", "a{", "a 1e999", "{} 1", "a b c d", "x" * 100_000 + " 1", "a{" * 50_000]
)
def test_metrics_that_are_none(text: str) -> None:
    assert all(abs(value) < 1e18 for values in parse_metrics(text).values() for value in values)


def test_cards_of_the_service_alone() -> None:
    text = "0, 1024, 97887, 41, 3\n1, 2048, 97887, 77, 99\n2, 9, 97887, 99, 100\n"
    assert parse_smi(text, [0, 1]) == Now(memory_used=3072, memory_total=195_774, hottest=77, busiest=99)
    assert parse_smi("0, [N/A], 97887, N/A, 3\n", [0]).memory_used == 0
    for text in ("", "garbage", "0, 1\n", "9, 1, 1, 1, 1\n"):
        assert parse_smi(text, [0]).problem


def test_a_row() -> None:
    now = combine(parse_metrics(METRICS), Now(memory_used=2048, memory_total=4096, hottest=50, busiest=9), 33.3)
    row = now.row()
    assert (row["tokens/s"], row["accept length"], row["running"], row["queued"]) == ("33.3", "4.25", "3", "")
    assert (row["VRAM GiB"], row["hottest C"], row["problem"]) == ("2.0/4", "50", "")
    assert combine(parse_metrics(METRICS), Now(), None).tokens_s == 120.5
    assert set(combine({}, Now(), None).row().values()) == {""}


def test_a_host_at_a_glance(tmp_path: Path) -> None:
    row, values = row_of(healthy_case(tmp_path / "a", "ct200"))
    assert row == {"gpus busy": "8 of 8", "verdict age": "7 d", "doctor": "ok"}
    assert values["ddtree_accept_length_floor"] == 2.0 and values["ddtree_speculation_expected"] == 1.0
    assert values["ddtree_doctor_errors"] == 0 and values["ddtree_service_restarts_total"] == 0
    idle, _ = row_of(healthy_case(tmp_path / "b", "b300"))
    assert (idle["gpus busy"], idle["verdict age"]) == ("0 of 8", "")
    sick, values = row_of(sick_case(tmp_path / "c", "smi-hangs"))
    assert sick["gpus busy"] == "?" and "driver-missing" in sick["doctor"]
    assert values["ddtree_gpus_busy"] is None and values["ddtree_doctor_errors"] == 1


def test_ages() -> None:
    assert [age(s) for s in (30, 3000, 7200, 1e6, -5, -500)] == [
        "0 min",
        "50 min",
        "2 h",
        "12 d",
        "0 min",
        "in the future",
    ]


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"sglang:num_running_reqs 1\n")


def test_a_page_that_is_not_whole_in_time_is_not_waited_for() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}", trust_env=False) as client:
            assert "num_running" in fetch(client)
            with pytest.raises(Failed, match="not whole after 0 s"):
                fetch(client, 0)
    finally:
        server.shutdown()
        server.server_close()
