"""Settings of the server: its address, who may use it, and limits."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Upstream:
    """An OpenAI-compatible server that generates, while the SDM LM here judges."""

    url: str  # up to and including /v1
    model: str
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # not a valid port
            known = False
        if not known:
            raise ValueError(f"The upstream {self.url!r} is no address: give one like http://127.0.0.1:8001/v1.")
        if not self.model:
            raise ValueError("The upstream needs the name of a model: give --upstream-model.")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server; the defaults suit one machine."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    max_batch: int = 16  # answers that the model works on at once
    max_queue: int = 256  # answers that may wait for it; more get 429
    max_concurrent: int = 512  # requests in progress, those whose body is still coming included; more get 429
    max_body_bytes: int = 1_000_000
    max_prompt_tokens: int | None = None  # below the model's own context
    timeout: float = 120.0  # seconds for one answer, waiting included
    upstream: Upstream | None = None

    def __post_init__(self) -> None:
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ValueError(f"The port is {self.port!r} but must lie between 0 and 65535.")
        for name in ("max_batch", "max_queue", "max_concurrent", "max_body_bytes", "max_prompt_tokens"):
            value = getattr(self, name)
            if name == "max_prompt_tokens" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r} but must be a whole number of at least 1.")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout is {self.timeout!r} but must be a number of seconds above 0.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip() == self.api_key != ""):
            raise ValueError("The API key must be plain characters without white space around them, and not empty.")

    @property
    def loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def feedback(self) -> bool:
        """Whether clients may change the support: only this machine's, or those with an API key."""
        return self.loopback or self.api_key is not None
