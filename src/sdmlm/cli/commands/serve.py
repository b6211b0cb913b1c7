"""`sdmlm serve`: the OpenAI-compatible server with verdicts, and its page."""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.server.settings import ServerSettings, Upstream
from sdmlm.storage.text_files import visible

if TYPE_CHECKING:
    import uvicorn

    from sdmlm.generation.language_model import SDMLanguageModel

EXAMPLES = """\
  sdmlm serve runs/demo/verified
  SDMLM_API_KEY=... sdmlm serve runs/lm --host 0.0.0.0 --port 8080
  sdmlm serve runs/lm --upstream http://127.0.0.1:8001/v1 --upstream-model big"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "serve an SDM language model: OpenAI's API with verdicts, and a page"
    parser = common.add_command(subparsers, "serve", help, EXAMPLES)
    parser.add_argument("model", metavar="DIR", help="folder of an SDM language model, or its name on the Hub")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port (8000; 0 takes a free one)")
    parser.add_argument("--api-key", metavar="KEY", help="what clients must send (default: $SDMLM_API_KEY, if set)")
    parser.add_argument("--alpha", type=float, metavar="A", help="another default alpha than the model's")
    parser.add_argument("--device", metavar="D", help="torch device, e.g. cpu or cuda (a GPU where there is one)")
    parser.add_argument("--restart", action="store_true", help="start again at once when it is killed (Linux)")
    group = parser.add_argument_group("limits")
    group.add_argument("--max-batch", type=int, default=16, metavar="N", help="answers written at once (16)")
    group.add_argument("--max-queue", type=int, default=256, metavar="N", help="answers that may wait (256)")
    group.add_argument("--max-concurrent", type=int, default=512, metavar="N", help="requests in progress (512)")
    group.add_argument("--max-body-bytes", type=int, default=1_000_000, metavar="N", help="size of a body (1000000)")
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="length of a prompt (the model's context)")
    group.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for one answer (120)")
    group = parser.add_argument_group("gateway: another server generates, this one judges")
    group.add_argument("--upstream", metavar="URL", help="OpenAI-compatible server, e.g. http://127.0.0.1:8001/v1")
    group.add_argument("--upstream-model", metavar="M", help="name of the model there")
    group.add_argument("--upstream-api-key-env", metavar="NAME", help="environment variable with the key for it")
    parser.epilog = f"{common.THREADS}\n\n{parser.epilog}"
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Load, listen, serve until a signal."""
    from sdmlm.language_model.loading import require_transformers

    settings = settings_of(args)
    require_server()
    require_transformers()
    # Before the model is loaded: a port in use is known at once.
    listening = listen(settings)
    try:
        if args.restart:
            from sdmlm.server.supervisor import keep_running

            keep_running(lambda: _serve(args, settings, listening), common.warn)
        else:
            _serve(args, settings, listening)
    finally:
        listening.close()


def _serve(args: argparse.Namespace, settings: ServerSettings, listening: socket.socket) -> None:
    from sdmlm.estimator.region import check_alpha
    from sdmlm.finetuning.threads import threads_for
    from sdmlm.generation.language_model import SDMLanguageModel

    alpha = None if args.alpha is None else check_alpha(args.alpha)
    lm = SDMLanguageModel.from_pretrained(args.model, device=common.checked_device(args.device))
    if alpha is not None:
        lm.alpha = alpha
    with threads_for(lm.model.num_parameters()):
        _serve_model(args, lm, settings, listening)


def _serve_model(
    args: argparse.Namespace, lm: SDMLanguageModel, settings: ServerSettings, listening: socket.socket
) -> None:
    import signal

    from sdmlm.server.app import make_app
    from sdmlm.server.model import Model

    folder = Path(args.model)
    name = folder.resolve().name if folder.is_dir() else args.model
    if not settings.loopback and settings.api_key is None:
        common.warn(f"anybody who can reach {settings.host} can use this server: give --api-key. Feedback is off.")
    app = make_app(Model(lm, name, settings), settings)
    server = make_server(app, settings, f"{name} at alpha {lm.alpha:g}", listening)
    # uvicorn finishes what is in progress when a signal comes, and then raises that signal again: ignore it then.
    before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def settings_of(args: argparse.Namespace) -> ServerSettings:
    """The checked settings of a command line."""
    upstream = None
    if args.upstream is not None:
        key = None
        if args.upstream_api_key_env is not None:
            key = os.environ.get(args.upstream_api_key_env)
            if not key:
                raise ValueError(f"The environment variable {args.upstream_api_key_env} is not set.")
        upstream = Upstream(args.upstream, args.upstream_model or "", key)
    elif args.upstream_model is not None or args.upstream_api_key_env is not None:
        raise ValueError("--upstream-model and --upstream-api-key-env go only with --upstream.")
    return ServerSettings(
        host=args.host,
        port=args.port,
        api_key=args.api_key if args.api_key is not None else key_of_environment(),
        max_batch=args.max_batch,
        max_queue=args.max_queue,
        max_concurrent=args.max_concurrent,
        max_body_bytes=args.max_body_bytes,
        max_prompt_tokens=args.max_prompt_tokens,
        timeout=args.timeout,
        upstream=upstream,
    )


def key_of_environment() -> str | None:
    """$SDMLM_API_KEY. A variable that is set but empty is refused, because it would protect nothing."""
    key = os.environ.get("SDMLM_API_KEY")
    if key is not None and not key.strip():
        raise ValueError("SDMLM_API_KEY is set but empty: give it a key, or unset it to serve without one.")
    return key


def require_server() -> None:
    """Refuse to continue without the libraries of the extra `serve`."""
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f'{missing[0]} is not installed: install the extra serve (in a clone: pip install -e ".[serve]").'
        )


def listen(settings: ServerSettings) -> socket.socket:
    """A socket that is bound, but does not listen yet."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"The host {settings.host} is not known here: try --host 127.0.0.1.") from error
    bound = socket.socket(family, kind)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ValueError(
            f"Cannot listen at {settings.host} port {settings.port} ({error.strerror}): give another --port or --host."
        ) from error
    return bound


def make_server(app: Any, settings: ServerSettings, what: str, listening: socket.socket) -> uvicorn.Server:
    """A server that prints its address when it is ready."""
    import uvicorn

    from sdmlm.server.connections import watched

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = listening.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"Serving {visible(what)} on http://{shown}:{port}", flush=True)
            if settings.upstream is not None:
                common.warn(
                    "Gateway: the upstream's own likelihoods are not seen, so those of the model here stand for them, and no "
                    "certificate covers the upstream's answers: measure on rows of yours what it verifies."
                )

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # paths and clients are for a proxy's log; counts are at /metrics
        timeout_graceful_shutdown=int(settings.timeout) + 5,
        server_header=False,
        http=watched(settings.timeout),
        ws="none",
    )
    return Server(config)
