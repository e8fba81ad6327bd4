"""Every kind of string that an inventory or a profile can hold, and where its value must arrive or not be.

Values go the way an operator's do: YAML text, the parsers, the resolved deployment, the rendered unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ddtree_ops.errors import UsageError
from ddtree_ops.model import Deployment, Workspace, load_workspace, resolve
from ddtree_ops.model.hostfile import parse_host
from ddtree_ops.model.profilefile import parse_profile
from ddtree_ops.model.yamlfile import read_yaml
from ddtree_ops.units import launch, model_path

from ..model.workspaces import HOST, make

RELEASE = "0123456789abcdef"
SPECIAL = "\\\"'%$;#@-+!: \t{}[]`=,&*?|<>~()xnu0é日🙂\x01\x1b\x7f\n\r\0\u0085\u2028\ufeff\ufffe"
ANY = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)
PIECES = st.lists(
    st.sampled_from(
        ["\nExecStartPre=/bin/sh", "\n[Service]", "%h", "$HOME", "${HOME}", "$$", "%%", "; /bin/sh", "/..", "--"]
    )
    | st.text(alphabet=SPECIAL, max_size=6)
    | st.text(alphabet="abcXYZ019._-/", max_size=6),
    max_size=4,
).map("".join)
WORDS = st.text(alphabet="abcz019_", min_size=1, max_size=8)
VALUES = PIECES | ANY | WORDS
PATHS = VALUES.map(lambda value: "/" + value) | VALUES


@dataclass(frozen=True)
class Kind:
    """``profile`` and ``host``: the YAML keys that hold the value; ``arrives``: what the process or we ourselves get of
    it. ``in_argv``: whether that is a word of the command line.
    """

    name: str
    profile: Callable[[str], dict[str, Any]] = lambda value: {}
    host: Callable[[str], dict[str, Any]] = lambda value: {}
    arrives: Callable[[Deployment, str], bool] = lambda deployment, value: True
    values: st.SearchStrategy[str] = VALUES
    in_argv: bool = False


def after(flag: str) -> Callable[[Deployment, str], bool]:
    """The word after a flag is the value (a path inside the release is completed)."""

    def arrives(deployment: Deployment, value: str) -> bool:
        argv = launch(deployment, RELEASE).argv
        share = f"{deployment.host.root}/releases/{RELEASE}/share"
        return argv[argv.index(flag) + 1] == model_path(value, share)

    return arrives


def key_file(deployment: Deployment, value: str) -> bool:
    return deployment.profile.api_key is not None and deployment.profile.api_key.file == value


KINDS = [
    Kind(
        "an argument",
        lambda value: {"extra_args": [value]},
        arrives=lambda deployment, value: launch(deployment, RELEASE).argv[-1] == value,
        in_argv=True,
    ),
    Kind(
        "a variable's value",
        lambda value: {"env": {"V": value}},
        arrives=lambda deployment, value: launch(deployment, RELEASE).env["V"] == value,
    ),
    Kind(
        "a variable's name",
        lambda value: {"env": {value: "x"}},
        arrives=lambda deployment, value: launch(deployment, RELEASE).env[value] == "x",
    ),
    Kind("the model", lambda value: {"model": value}, arrives=after("--model-path"), values=PATHS, in_argv=True),
    Kind(
        "the drafter",
        lambda value: {"drafter": value},
        arrives=after("--speculative-draft-model-path"),
        values=PATHS,
        in_argv=True,
    ),
    Kind("the bind", lambda value: {"bind": value, "open": "tests"}, arrives=after("--host"), in_argv=True),
    Kind(
        "the attention backend",
        lambda value: {  # a tree has no choice of one
            "extends": "chain",
            "engine": "sglang",
            "release_base": "sglang-0.5.17",
            "attention_backend": value,
        },
        arrives=after("--attention-backend"),
        in_argv=True,
    ),
    Kind(
        "the reason for an open port",
        lambda value: {"bind": "0.0.0.0", "open": value},
        arrives=lambda deployment, value: deployment.profile.open == value,
    ),
    Kind("the key's file", lambda value: {"api_key": {"file": value}}, arrives=key_file, values=PATHS),
    Kind(
        "the release base",
        lambda value: {"release_base": value},
        arrives=lambda deployment, value: deployment.profile.release_base == value,
    ),
    Kind(
        "the prompts' file",
        lambda value: {"exactness": {"prompts": value}},
        arrives=lambda deployment, value: deployment.profile.exactness.prompts == value,
    ),
    Kind(
        "the host's root",
        host=lambda value: {"root": value},
        arrives=lambda deployment, value: deployment.host.root == value,
        values=PATHS,
        in_argv=True,
    ),
    Kind(
        "the address",
        host=lambda value: {"address": value},
        arrives=lambda deployment, value: deployment.host.address == value,
    ),
    Kind(
        "the user", host=lambda value: {"user": value}, arrives=lambda deployment, value: deployment.host.user == value
    ),
    Kind(
        "the identity file",
        host=lambda value: {"identity_file": value},
        arrives=lambda deployment, value: (
            deployment.host.identity_file
            == (value if value.startswith("~") else str(deployment.workspace_path / value))
        ),
        values=PATHS,
    ),
    Kind(
        "the GPUs' name",
        host=lambda value: {"gpus": {**yaml.safe_load(HOST)["gpus"], "name": value}},
        arrives=lambda deployment, value: deployment.host.gpus.name == value,
    ),
    Kind(
        "a secret's name",
        host=lambda value: {"secrets": {value: {"file": "/etc/key"}}},
        arrives=lambda deployment, value: value in deployment.host.secrets,
    ),
    Kind(
        "a service's name",
        host=lambda value: {"services": {value: {"base": "tiny", "profile": "over", "port": 30000}}},
        arrives=lambda deployment, value: deployment.service_name == value,
    ),
    Kind(
        "a rule's reason",
        host=lambda value: {"rules": [{"when": {"arch": "sm_120"}, "set": {"stop_timeout_s": 9}, "reason": value}]},
        arrives=lambda deployment, value: deployment.profile.applied_rules[0].reason == value,
    ),
]


class Inventory:
    """A workspace of which one profile and one host are written anew for every value."""

    def __init__(self, folder: Path) -> None:
        make(folder, {"profiles/over.yaml": "extends: b8k4\n"}, host=HOST.replace("profile: b8k4", "profile: over"))
        self._workspace: Workspace = load_workspace(folder)
        self._file = folder / "value.yaml"

    def deployment(self, kind: Kind, value: str) -> Deployment:
        """Raises UsageError for what is refused."""
        profile = self._read({"extends": "b8k4", **kind.profile(value)})
        host = self._read({**yaml.safe_load(HOST.replace("profile: b8k4", "profile: over")), **kind.host(value)})
        parsed = parse_host(host, "h", self._workspace.path)
        profiles = {**self._workspace.profiles, "over": parse_profile(profile, "over")}
        changed = msgspec.structs.replace(self._workspace, hosts={"h": parsed}, profiles=profiles)
        return resolve(changed, "h", None, None)

    def _read(self, values: dict[str, Any]) -> Any:
        self._file.write_bytes(yaml.safe_dump(values, allow_unicode=False, width=1 << 20).encode())
        return read_yaml(self._file, self._file.name)


def accepted(kind: Kind, inventory: Inventory, count: int) -> Iterator[tuple[str, Deployment]]:
    """Of ``count`` generated values (the same ones in every run) those that are not refused."""
    found: dict[str, Deployment] = {}

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(kind.values)
    def collect(value: str) -> None:
        try:
            found[value] = inventory.deployment(kind, value)
        except UsageError:
            return

    collect()
    yield from found.items()
