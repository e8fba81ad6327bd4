"""The files of a generation as text. Pure: a deployment and a release id in, texts out."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ddtree_ops.data import data_dir
from ddtree_ops.model.stored import profile_to_json, two_space_json
from ddtree_ops.model.types import Deployment
from ddtree_ops.units import escape
from ddtree_ops.units.launch import API_KEY, launch, uses_gpus

if TYPE_CHECKING:
    from jinja2 import Environment, Template

SERVICE_USER = "ddtree"
TEMPLATES = UNIT, ENV = "service.unit.j2", "service.env.j2"
_compiling = threading.Lock()


class Rendered(NamedTuple):
    """A generation's files by name: "unit", "env", "process.json", "profile.json"."""

    files: dict[str, str]


def render(deployment: Deployment, release_id: str, generation: int) -> Rendered:
    """A generation's files: systemd unit, its EnvironmentFile, the process supervisor's file, the resolved profile.

    All four are rendered for either supervisor; argv and environment of unit and process.json are the same ones.
    Raises UsageError when a value cannot be written so that it arrives unchanged.
    """
    started = launch(deployment, release_id)
    host, profile, name = deployment.host, deployment.profile, deployment.service_name
    here = f"{host.root}/services/{name}/generations/{generation}"
    outside = [host.root, profile.model, profile.drafter or ""]
    key = profile.api_key.file if profile.api_key is not None else None
    shared = {"name": name, "host": host.name, "profile": profile, "generation": generation}
    unit = _template(UNIT).render(
        **shared,
        user=SERVICE_USER,
        environment_file=f"{here}/env",
        argv=started.argv,
        cwd=started.cwd,
        gpus=uses_gpus(deployment),
        credential=None if key is None else f"{API_KEY}:{escape.unit_path(key)}",
        peers=profile.nodes.addresses if profile.nodes is not None else [],
        # Both would hide the release or the weights from the service.
        under_home=any(path.startswith(("/home/", "/root/", "/run/user/")) for path in outside),
        under_tmp=any(path.startswith(("/tmp/", "/var/tmp/")) for path in outside),
    )
    return Rendered(
        {
            "unit": unit,
            "env": _template(ENV).render(**shared, env=started.env),
            "process.json": two_space_json(started._asdict()),
            "profile.json": profile_to_json(profile),
        }
    )


@functools.cache
def _environment(templates: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Not HTML: escaping is the filters below, and a name that a template does not get is an error.
    environment = Environment(
        loader=FileSystemLoader(templates),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    environment.filters |= {
        "exec_line": escape.exec_line,
        "unit_path": escape.unit_path,
        "unit_text": escape.unit_text,
    }
    environment.globals["environment_file_line"] = escape.environment_file_line
    return environment


def warm() -> None:
    """Loads what `render` needs, for whoever has to wait for something else anyway."""
    for name in TEMPLATES:
        _template(name)


def _template(name: str) -> Template:
    with _compiling:  # hosts are planned in threads: one compiles, the others wait for it
        return _environment(data_dir("templates")).get_template(name)
