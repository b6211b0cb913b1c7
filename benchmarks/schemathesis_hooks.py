"""For schemathesis (docs/serving.md): what is refused although its schema allows it.

A schema cannot say that the last message is to be answered, nor how many tokens a prompt has. Everything else that the
description allows must be accepted.
"""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.check  # type: ignore[untyped-decorator]
def accepted_as_described(context: Any, response: Any, case: Any) -> None:
    """In place of the check `positive_data_acceptance`."""
    if response.status_code != 400 or not case.meta or not case.meta.generation.mode.is_positive:
        return
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded" or "ends with" in error["message"], error
