"""Values as JSON can hold them."""

from __future__ import annotations

import math
from typing import Any


def plain_json(value: Any) -> Any:
    """The value with None for NaN and infinities, which JSON does not have, and plain numbers and lists for NumPy's."""
    if isinstance(value, dict):
        return {str(key): plain_json(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(v) for v in value]
    if hasattr(value, "tolist"):
        return plain_json(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
