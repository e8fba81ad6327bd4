"""Inside a tree's Python: requests as SGLang's HTTP server takes them."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter


def refused(bodies: list[dict[str, Any]], vocab_size: int) -> list[str]:
    """What SGLang says against each body of POST /generate; empty where it takes it.

    The steps of its own server: the body becomes a GenerateReqInput (http_server.generate_request), that is normalised
    (TokenizerManager.generate_request), and its sampling parameters are made and verified (_create_tokenized_object).
    """
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    taken, found = TypeAdapter(GenerateReqInput), []
    known = set(GenerateReqInput.__dataclass_fields__)
    for body in bodies:
        try:
            # A key that SGLang does not know is dropped without a word: what it asks for would not be done.
            if unknown := set(body) - known:
                raise ValueError(f"unknown keys {sorted(unknown)}")
            request = taken.validate_python(body)
            request.normalize_batch_and_arguments()
            sampling = SamplingParams(**(request.sampling_params or {}))
            sampling.normalize(None)
            sampling.verify(vocab_size)
            found.append("")
        except Exception as error:  # whatever it raises is what a client would be told
            found.append(f"{type(error).__name__}: {error}")
    return found
