"""The fault matrix: what happens to a deploy, on real hosts, and the end that each row declares for it.

``python -m tests.hosts.matrix`` (``make fault-matrix``) runs it and can resume; tests/hosts/test_matrix.py runs a few.
"""
