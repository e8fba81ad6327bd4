"""ddtree: deploys DDTree speculative decoding to GPU hosts, proves it exact, and keeps the evidence."""

__version__ = "0.1.0"
