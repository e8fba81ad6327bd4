"""Fabric's own connect, run('true'), close. argv: address, identity file."""

import sys

from fabric import Connection

with Connection(sys.argv[1], user="root", connect_kwargs={"key_filename": sys.argv[2]}) as connection:
    connection.run("true", in_stream=False)
