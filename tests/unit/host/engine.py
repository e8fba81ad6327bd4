"""A scripted server: answers /health and /server_info as its arguments say. Standard library only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

given = dict(word.partition("=")[::2] for word in sys.argv[1:])
started = time.monotonic()
for line in given.get("say", "").split("|"):
    print(line, flush=True)
print("hidden:", os.environ.get("ENGINE_API_KEY", ""), flush=True)
if "orphan" in given:  # re-parented and in a session of its own, as some schedulers are
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if "exit" in given:
    time.sleep(float(given.get("after", "0")))
    raise SystemExit(int(given["exit"]))
for _ in range(int(given.get("chatter", "0"))):
    print("x" * 1000, flush=True)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        code, body = 404, b"{}"
        if self.path == "/health":
            sick = "sick" in given or Path(given.get("sick_while", "/nonexistent")).exists()
            code = 200 if not sick and time.monotonic() - started > float(given.get("load", "0")) else 503
        elif self.path == "/server_info":
            code, body = 200, json.dumps({"who": given.get("who"), **json.loads(given.get("info", "{}"))}).encode()
        if "drip" in given:  # an answer that never ends
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b".")
                time.sleep(0.2)
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


HTTPServer.allow_reuse_address = True
HTTPServer(("127.0.0.1", int(given["port"])), Handler).serve_forever()
