"""What tests/gpu/run is made of: trees (what is served), servers, questions, and the experiments by selection."""
