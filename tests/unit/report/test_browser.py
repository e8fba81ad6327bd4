"""Given the page in a real browser, it stands by itself: nothing is fetched, nothing overflows, charts are drawn."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent / "stored" / "expected" / "report.html"
#: Run in the page once it is laid out; the test's own script, so the page's rule against scripts is taken out first.
LOOK = """
addEventListener('load', () => {
  const charts = [...document.querySelectorAll('svg')];
  const outside = (svg) => [...svg.querySelectorAll('text')].filter((t) => {
    const box = t.getBoundingClientRect(), frame = svg.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
      || box.bottom > frame.bottom + 1;
  }).map((t) => t.textContent);
  const told = {
    fetched: performance.getEntriesByType('resource').map((r) => r.name),
    charts: charts.map((svg) => svg.getBoundingClientRect().width),
    outside: charts.flatMap(outside),
    empty: charts.filter((svg) => !svg.querySelector('polyline,rect[height],circle')).length,
    tables: document.querySelectorAll('table tbody tr').length,
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    title: document.title,
  };
  const pre = document.createElement('pre');
  pre.id = 'told';
  pre.textContent = JSON.stringify(told);
  document.body.append(pre);
});
"""


def browser() -> str | None:
    return os.environ.get("BROWSER_BINARY") or shutil.which("chromium") or shutil.which("google-chrome")


def dumped(page: Path, profile: Path, *options: str) -> str:
    argv = [str(browser()), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *options]
    argv += [f"--user-data-dir={profile}", "--virtual-time-budget=5000", "--dump-dom", page.as_uri()]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.browser
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_stands_by_itself_on_a_narrow_and_a_wide_screen(tmp_path: Path, width: int) -> None:
    text = PAGE.read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    loose = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    page.write_text(loose.replace("</body>", f"<script>{LOOK}</script></body>"), encoding="utf-8")
    # Chromium has no window narrower than 500 px: the page is put into a frame of the width instead.
    outer = tmp_path / "outer.html"
    outer.write_text(f'<iframe src="page.html" width="{width}" height="900" style="border:0"></iframe>')
    framed = tmp_path / "framed.html"
    script = (
        "addEventListener('load', () => setTimeout(() => { const inner = "
        "document.querySelector('iframe').contentDocument.getElementById('told').textContent;"
        "document.body.textContent = inner; document.body.id = 'told'; }, 500))"
    )
    framed.write_text(outer.read_text() + f"<script>{script}</script>")
    dom = dumped(framed, tmp_path / "profile", "--allow-file-access-from-files", "--window-size=1400,1000")
    found = re.search(r'id="told"[^>]*>(.*?)</', dom, re.DOTALL)
    assert found is not None, dom[-2000:]
    told: dict[str, Any] = json.loads(unescape(found[1]))
    assert told["title"] == "Sweep of tiny on local"
    assert told["fetched"] == []
    assert len(told["charts"]) == 6 and all(100 < chart <= width for chart in told["charts"])
    assert told["outside"] == [] and told["empty"] == 0
    assert told["tables"] > 10
    assert told["wide"] <= 0


@pytest.mark.browser
def test_the_page_as_it_is_runs_no_script(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "<script" not in text
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", "<script>document.title = 'ran'</script></body>"), encoding="utf-8")
    assert "<title>Sweep of tiny on local</title>" in dumped(page, tmp_path / "profile")
