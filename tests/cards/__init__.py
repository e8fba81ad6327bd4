"""Every Triton kernel that a DDTREE server launches, compiled for cards that are not there: python -m tests.cards"""
