"""Facts of one host for ``ddtree doctor``: reads, and changes nothing. Python >= 3.9, standard library only.

Takes one JSON request as its argument, answers one JSON document on stdout. Every part runs on its own thread; what has
not ended by the deadline is named in ``unfinished``, and every program that was started is then killed. What a program
prints is bounded in size and in time, and all text loses its control characters and what looks like a secret.
"""
