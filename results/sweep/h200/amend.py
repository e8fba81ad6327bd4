"""Takes out of the records what ddtree had made up: python results/sweep/h200/amend.py < AS-WRITTEN > records.jsonl

The sweep ran before verify steps were read as SGLang 0.5.17 tells them, at a request's end alone, so what it had spread
over chunks was wrong: commit lengths, accept length over time, steps/s of a window, the time of a step. At C=1 the last
two follow from the requests' own rows (nothing else runs beside them); the rest is null. All else is as measured.
"""

import json
import statistics
import sys

for line in sys.stdin:
    record = json.loads(line)
    for repeat in record.get("repeats", []):
        rows = [row for row in repeat["rows"] if row[2] is not None]
        if not rows:
            continue
        # prompt, tokens, steps, seconds, TTFT, ...
        alone = record["cell"]["load"]["concurrency"] == 1
        repeat |= {"commits": {}, "unseen_steps": sum(row[2] for row in rows), "accept_over_time": []}
        repeat["step_ms"] = statistics.median(1000 * (row[3] - row[4]) / row[2] for row in rows) if alone else None
        repeat["steps_per_s"] = sum(row[2] for row in rows) / repeat["seconds"] if alone else None
    print(json.dumps(record, separators=(",", ":"), ensure_ascii=False))
