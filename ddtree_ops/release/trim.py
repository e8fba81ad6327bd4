"""What wheels carry and no engine ever loads. The release's smoke imports prove that nothing here is needed."""

from __future__ import annotations

from fnmatch import fnmatchcase

#: (pattern on the path below site-packages, where * crosses directories; why it is not needed to serve)
TRIM: tuple[tuple[str, str], ...] = (
    ("*.dist-info/RECORD", "verified while unpacking; it would name files that are trimmed"),
    ("*.dist-info/sboms/*", "bill of materials of the build"),
    ("*.a", "static libraries, to link against"),
    ("*.pyi", "types for checkers"),
    ("*.h", "headers, to compile against"),
    ("*.pxd", "Cython declarations"),
    ("torch/include/*", "headers (39 MB)"),
    ("torch/share/*", "CMake files"),
    ("torch/test/*", "C++ test programs (86 MB)"),
    ("torch/bin/*", "C++ test programs and protoc (52 MB)"),
    ("torch/lib/libtorchbind_test.so", "test library"),
    ("torch/lib/libjitbackend_test.so", "test library"),
    ("torch/lib/libbackend_with_compiler.so", "test library"),
    ("torch/lib/libaoti_custom_ops.so", "test library"),
    ("numpy/*/tests/*", "numpy's own tests"),
    ("numpy/tests/*", "numpy's own tests"),
    ("numpy/f2py/*", "Fortran compiler front end"),
)
#: Exceptions from the above.
KEEP: tuple[tuple[str, str], ...] = (("torch/bin/torch_shm_manager", "import torch fails without it"),)


def is_trimmed(path: str) -> bool:
    """Whether a file of a wheel is left out; ``path`` is relative to site-packages."""
    if any(fnmatchcase(path, pattern) for pattern, _ in KEEP):
        return False
    return any(fnmatchcase(path, pattern) for pattern, _ in TRIM)
