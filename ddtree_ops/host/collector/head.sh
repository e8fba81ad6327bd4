#!/bin/sh
# Facts for `ddtree doctor`: reads this host and changes nothing. By hand: sh THIS-FILE [REQUEST-AS-JSON]
set -u
python=
seen=
for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9; do
    command -v "$name" >/dev/null 2>&1 || continue
    found=$("$name" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3]); sys.exit(sys.version_info < (3, 9))' \
        2>/dev/null </dev/null) && python=$name && break
    seen="$seen $found"
done
if [ -z "$python" ]; then
    printf '{"format": 1, "no_python": "%s"}\n' "$seen"
    exit 0
fi
