"""Log lines after which a server never becomes healthy: the wait ends at once.

Regular expressions, matched by the host against each line of the service's log since its start.
"""

FATAL_LINES: tuple[str, ...] = (
    r"out of resource: shared memory",  # Hopper tiles on sm_120
    r"CUDA out of memory|torch\.OutOfMemoryError|Not enough memory",
    r"no kernel image is available",  # a wheel without this arch
    r"undefined symbol:",  # torch / kernel / CUDA ABI mismatch
    r"ptxas fatal",
    r"CUDA error: (device-side assert|an illegal memory access)",
    r"\[Errno 98\]|address already in use",
    r"ModuleNotFoundError: |ImportError: ",
    r"error: unrecognized arguments: ",
    r"(system not yet initialized|error 802)",  # fabric manager missing or of another version than the driver
)
