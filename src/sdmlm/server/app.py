"""The ASGI app: its routes."""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

from sdmlm import __version__
from sdmlm.server import protocol
from sdmlm.server.answers import ResponseBuilder, evidence
from sdmlm.server.errors import ApiError, busy, too_slow
from sdmlm.server.fields import Body, read_json
from sdmlm.server.gateway import Gateway
from sdmlm.server.metrics import Metrics
from sdmlm.server.model import Model, OnText
from sdmlm.server.openapi import describe_api
from sdmlm.server.settings import ServerSettings
from sdmlm.server.streaming import AnswerStream
from sdmlm.server.web import LEFT, ErrorAnswer, GuardMiddleware, JSONAnswer, StreamAnswer, read_body, unless_left
from sdmlm.server.work import Judged

T = TypeVar("T")
PAGE = Path(__file__).parent / "page"
TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
}


class Service:
    """Shared by the routes: the model, the limits, the metrics."""

    def __init__(self, model: Model, settings: ServerSettings) -> None:
        self.model, self.settings = model, settings
        at_once = min(settings.max_concurrent, settings.max_queue)
        self.writer = Gateway(model, settings.upstream, at_once) if settings.upstream else model
        self.in_progress = 0
        self.metrics = Metrics(lambda: len(model.engine), lambda: self.in_progress)

    @contextlib.contextmanager
    def at_work(self, check: bool = True) -> Iterator[None]:
        """Count a request as in progress; with `check`, refuse it if too many are already."""
        if check and self.in_progress >= self.settings.max_concurrent:
            raise busy(f"{self.in_progress} requests are in progress, and no more may be: try again later.", 1.0)
        self.in_progress += 1
        try:
            yield
        finally:
            self.in_progress -= 1

    async def body(self, request: Request) -> dict[str, Any]:
        """The JSON object that was sent."""
        return read_json(await read_body(request, self.settings.max_body_bytes, self.settings.timeout))

    async def generate(self, ask: protocol.Ask, on_text: OnText | None = None) -> list[Judged]:
        """Answers within the time limit, counted in the metrics."""
        with self.at_work(check=False):  # a stream is still in progress after its request was read and checked
            return self.counted(await self.in_time(self.writer.generate(ask, on_text)))

    async def verify(self, documents: list[protocol.GivenAnswer], sdm: protocol.SdmOptions) -> list[Judged]:
        """Verdicts within the time limit, counted in the metrics."""
        return self.counted(await self.in_time(self.model.verify(documents, sdm)))

    async def in_time(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of some work, or an error if it exceeds the time limit."""
        try:
            return await asyncio.wait_for(work, self.settings.timeout)
        except TimeoutError as error:
            raise too_slow(self.settings.timeout) from error

    def counted(self, judged: list[Judged]) -> list[Judged]:
        for each in judged:
            v = each.verification
            self.metrics.judged(v.outcome, v.prompt_tokens, v.completion_tokens)
        return judged

    def check_feedback(self) -> None:
        """Refuse feedback where anybody could give it: it changes what the model accepts."""
        if not self.settings.feedback:
            raise ApiError(
                403,
                "Feedback needs an API key where the server can be reached from other machines: start it with --api-key.",
                code="feedback_disabled",
            )


def make_app(model: Model, settings: ServerSettings) -> FastAPI:
    """The ASGI app around a model."""
    service = Service(model, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(model.close, settings.timeout)

    # FastAPI's documentation pages would load scripts from other servers.
    app = FastAPI(
        title="sdmlm", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan
    )
    app.add_middleware(GuardMiddleware, settings=settings, metrics=service.metrics)
    add_answers(app, service)
    add_documents(app, service)
    add_metadata(app, service)
    add_page(app)
    add_errors(app)
    return app


def add_answers(app: FastAPI, service: Service) -> None:
    """The routes /v1/chat/completions and /v1/completions."""

    async def answer(request: Request, ask: protocol.Ask) -> Response:
        builder = ResponseBuilder.of(ask, service.model.name, service.model.fingerprint)
        return JSONAnswer(builder.whole(await unless_left(request, service.generate(ask))))

    async def stream(request: Request, ask: protocol.Ask) -> Response:
        builder = ResponseBuilder.of(ask, service.model.name, service.model.fingerprint)
        answers = AnswerStream(builder, lambda on_text: service.generate(ask, on_text))
        try:
            await unless_left(request, answers.begin())
        except BaseException:
            answers.close()
            raise
        return StreamAnswer(answers, service.settings.timeout)

    async def either(request: Request, read: Callable[[Body, str], protocol.Ask]) -> Response:
        with service.at_work():
            ask = read(await service.body(request), service.model.name)
        return await (stream(request, ask) if ask.stream else answer(request, ask))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await either(request, protocol.read_chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await either(request, protocol.read_completion)


def add_documents(app: FastAPI, service: Service) -> None:
    """The routes /v1/verify and /v1/feedback."""

    @app.post("/v1/verify")
    async def verify(request: Request) -> Response:
        with service.at_work():
            documents, sdm = protocol.read_verify(await service.body(request), service.model.name)
            judged = await unless_left(request, service.verify(documents, sdm))
        return JSONAnswer({"object": "list", "model": service.model.name, "data": [evidence(each) for each in judged]})

    @app.post("/v1/feedback")
    async def feedback(request: Request) -> Response:
        service.check_feedback()
        with service.at_work():
            given = protocol.read_feedback(await service.body(request), service.model.name)
            id, size = await service.in_time(service.model.feedback(given))
        return JSONAnswer({"id": id, "object": "feedback", "support_size": size})

    @app.delete("/v1/feedback/{id}")
    async def undo(id: str) -> Response:
        service.check_feedback()
        with service.at_work():
            await service.in_time(service.model.undo_feedback(id))
        return JSONAnswer({"id": id, "object": "feedback", "deleted": True})


def add_metadata(app: FastAPI, service: Service) -> None:
    """Routes that need no pass of the model."""

    def card() -> dict[str, Any]:
        return {"id": service.model.name, "object": "model", "created": service.model.created, "owned_by": "sdmlm"}

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONAnswer({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        protocol.check_model({"model": name}, service.model.name)
        return JSONAnswer(card())

    @app.get("/v1/sdm")
    async def sdm() -> Response:
        return JSONAnswer(service.model.info)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JSONAnswer(describe_api(service.model.name, service.settings))

    @app.get("/health")
    async def health() -> Response:
        ok = service.model.engine.alive
        return JSONAnswer({"status": "ok" if ok else "failed", "version": __version__}, 200 if ok else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_page(app: FastAPI) -> None:
    """The page and its files: only those that are in its folder by name."""

    def file(name: str) -> Response:
        if name not in {path.name for path in PAGE.iterdir()}:
            raise HTTPException(404)
        path = PAGE / name
        kind = TYPES.get(path.suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(path.read_bytes(), headers={"Cache-Control": "no-cache", "Content-Type": kind})

    @app.get("/")
    async def page() -> Response:
        return file("index.html")

    @app.get("/{name}")
    async def part(name: str) -> Response:
        return file(name)


def add_errors(app: FastAPI) -> None:
    """Every error has OpenAI's format."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> Response:
        return ErrorAnswer(error)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=LEFT)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        said = {404: f"There is nothing at {request.url.path[:80]}.", 405: f"{request.method} is not for this address."}
        return ErrorAnswer(
            ApiError(error.status_code, said.get(error.status_code, error.detail), headers=error.headers)
        )
