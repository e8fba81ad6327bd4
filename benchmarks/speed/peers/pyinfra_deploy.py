"""Five operations with nothing to change: template, directory, user, service, command."""

from pathlib import Path

from pyinfra import host
from pyinfra.facts.files import File
from pyinfra.operations import files, server, systemd

HERE = Path(__file__).parent

files.template(
    name="template", src=str(HERE / "peer.conf.j2"), dest="/etc/pyinfra.conf", mode="644", words=list(range(200))
)
files.directory(name="directory", path="/srv/pyinfra", mode="755")
server.user(name="user", user="pyinfra", home="/srv/pyinfra", shell="/usr/sbin/nologin", ensure_home=False)
systemd.service(name="service", service="ssh", running=True, enabled=True)
if not host.get_fact(File, path="/srv/pyinfra.done"):
    server.shell(name="command", commands=["touch /srv/pyinfra.done"])
