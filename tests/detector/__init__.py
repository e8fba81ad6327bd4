"""The test of the test: the exactness gate as a detector, on engines with planted faults and on healthy ones."""
