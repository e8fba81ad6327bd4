"""The host's half of ddtree-ops: one standard-library file (Python >= 3.9), root-owned, outside the releases.

It runs in two ways: by stdin (``python3 -I -S -``), the client appending what calls ``main_request(TEXT)``, and as
``<root>/bin/ddtree-host VERB`` once ``bootstrap`` wrote it. A request is one JSON object, its reply one JSON document.

Layout under ``<root>``: bin/, releases/<id>/, store/<aa>/<sha256>, services/<name>/{lock, state.json, journal.jsonl,
txn/<txn>/, generations/<n>/, run/}. The *switch file* of a service is ``<unit_dir>/<name>.service`` (systemd) or
``services/<name>/process.json`` (process supervisor).

How a deploy stays safe:

* One process, the applier, holds the service's flock for its whole life and walks `STEPS`; each step is journaled
  (fsync) before and after. Before the first step ``state.json`` says *pending*.
* Confirm and stand-down are one fsynced rename of ``state.json`` each; ``state.json`` is the truth, the journal its
  story. ``state.last`` carries the terminal entry, so a journal cut short is completed by whoever comes next.
* `recover` is the only code that restores. It runs under the same flock: called by the applier on any failure, by
  systemd when the applier died (ExecStopPost), by the boot one-shot, by the verb. It is idempotent.
* Every file of state or unit is replaced by temp + fsync + rename + fsync of the directory (`write_file`).
"""
