"""The application: its routes with their scopes, and the objects that they need."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.anthropic.fields import ConversationFields, MessagesFields
from gateway.api.anthropic.models import ModelsQuery
from gateway.api.anthropic.routes import count_tokens, create_message
from gateway.api.common.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from gateway.api.common.ops import abort_request, health, metrics, page, page_file, ready, version
from gateway.api.common.resumable import resume_stream
from gateway.api.openai.answers import (
    AbortAnswer,
    ChatAnswer,
    CompletionAnswer,
    DetokenizeAnswer,
    EmbeddingAnswer,
    MessageAnswer,
    ModelAnswer,
    ModelInfoAnswer,
    ModelListAnswer,
    ModelPageAnswer,
    RenderAnswer,
    StatusAnswer,
    TokenCountAnswer,
    TokenizeAnswer,
    VersionAnswer,
)
from gateway.api.openai.chat import chat_completions
from gateway.api.openai.completions import completions
from gateway.api.openai.embeddings import EmbeddingFields, embeddings
from gateway.api.openai.models import get_model, list_models
from gateway.api.openai.tokenize import detokenize, render_chat, render_completion, tokenize
from gateway.api.responses.answers import (
    InputItemsAnswer,
    InputTokensAnswer,
    ResponseAnswer,
    ResponseDeletedAnswer,
    ResponseEvent,
)
from gateway.api.responses.fields import InputTokensFields, ItemsQuery, ResponseFields, RetrieveQuery
from gateway.api.responses.routes import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from gateway.http.app_keys import SERVICES, Services
from gateway.http.auth import Scope
from gateway.http.route import BetaQuery, Handler, Route
from gateway.middleware import Middleware
from gateway.openapi import ROUTE_TABLE, openapi
from gateway.siblings import relayed, sibling_app
from gateway.stores.responses import ResponseStore

_SWEEP_SECONDS = 30.0


def _get(path: str, handler: Handler, answer: type[msgspec.Struct] | str | None, **more: Any) -> Route:
    return Route("GET", path, handler, Scope.INFERENCE, None, answer, **more)


def _public(path: str, handler: Handler, answer: type[msgspec.Struct] | str | None = None, **more: Any) -> Route:
    return Route("GET", path, handler, Scope.PUBLIC, None, answer, **more)


def _post(
    path: str, handler: Handler, body: type[msgspec.Struct] | None, answer: type[msgspec.Struct], **more: Any
) -> Route:
    return Route("POST", path, handler, Scope.INFERENCE, body, answer, **more)


def _delete(path: str, handler: Handler, answer: type[msgspec.Struct]) -> Route:
    return Route("DELETE", path, handler, Scope.INFERENCE, None, answer)


_RESPONSE_EVENTS = {"streams": True, "events": ResponseEvent}

FOLLOW_UPS = (
    _delete("/v1/requests/{id}", abort_request, AbortAnswer),
    _get("/v1/responses/{id}", get_response, ResponseAnswer, **_RESPONSE_EVENTS, query=RetrieveQuery),
    _delete("/v1/responses/{id}", delete_response, ResponseDeletedAnswer),
    _post("/v1/responses/{id}/cancel", cancel_response, None, ResponseAnswer),
    _get("/v1/responses/{id}/input_items", list_input_items, InputItemsAnswer, query=ItemsQuery),
    _get("/v1/streams/{id}", resume_stream, "text/event-stream", headers=("Last-Event-ID",)),
)
"""Routes that are forwarded to the gateway process that holds the object which the id names."""

_GENERATES = {"streams": True, "admitted": True}

ROUTES = (
    _post("/v1/chat/completions", chat_completions, ChatFields, ChatAnswer, **_GENERATES),
    _post("/v1/completions", completions, CompletionFields, CompletionAnswer, **_GENERATES),
    _post("/v1/embeddings", embeddings, EmbeddingFields, EmbeddingAnswer, admitted=True),
    _post("/v1/chat/completions/render", render_chat, ChatFields, RenderAnswer),
    _post("/v1/completions/render", render_completion, CompletionFields, RenderAnswer),
    _post("/v1/messages", create_message, MessagesFields, MessageAnswer, **_GENERATES, query=BetaQuery),
    _post("/v1/messages/count_tokens", count_tokens, ConversationFields, TokenCountAnswer, query=BetaQuery),
    _post("/v1/responses", create_response, ResponseFields, ResponseAnswer, **_RESPONSE_EVENTS, admitted=True),
    _post("/v1/responses/input_tokens", count_input_tokens, InputTokensFields, InputTokensAnswer),
    _get("/v1/models", list_models, ModelListAnswer, anthropic_answer=ModelPageAnswer, query=ModelsQuery),
    _get("/v1/models/{model:.+}", get_model, ModelAnswer, anthropic_answer=ModelInfoAnswer, query=BetaQuery),
    _post("/tokenize", tokenize, TokenizeFields, TokenizeAnswer),
    _post("/detokenize", detokenize, DetokenizeFields, DetokenizeAnswer),
    _public("/health", health, StatusAnswer),
    _public("/ready", ready, StatusAnswer, failures=(503,)),
    _public("/version", version, VersionAnswer),
    _public("/openapi.json", openapi),
    # Links to the page may carry query parameters of visit counters.
    _public("/", page, "text/html", query=None),
    _public("/page/{file}", page_file, "text/javascript"),
    # On a server with keys any key may read it (Prometheus: `authorization`); on an open server, everyone.
    _get("/metrics", metrics, "text/plain"),
    *(dataclasses.replace(route, handler=relayed(route.handler)) for route in FOLLOW_UPS),
)


def build_app(
    services: Services,
    *,
    check_host: bool,
    cors_origins: Iterable[str] = (),
    routes: Iterable[Route] = ROUTES,
) -> web.Application:
    """Return an application for gateway.server.HttpRunner."""
    registered: dict[web.AbstractRoute, Route] = {}
    around = Middleware(registered, check_host=check_host, cors_origins=tuple(cors_origins))
    app = web.Application(middlewares=[web.middleware(around)], client_max_size=services.max_body_size)
    app[ROUTE_TABLE] = table = tuple(routes)
    for route in table:
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        for method in methods:
            added = app.router.add_route(method, route.path, route.handler, expect_handler=_expect)
            registered[added] = route
    app.on_response_prepare.append(around.add_headers)
    app[SERVICES] = services
    app.cleanup_ctx.append(_stores)
    return app


def follow_ups(public: web.Application) -> web.Application:
    """Return the application that answers the other gateway processes."""
    return sibling_app([(route.method, route.path, route.handler) for route in FOLLOW_UPS], public)


async def _stores(app: web.Application) -> AsyncIterator[None]:
    """Forget expired objects in the background; at the end, stop everything that runs without a connection."""
    sweeping = asyncio.create_task(_sweep(app[SERVICES].responses))
    yield
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)
    await app[SERVICES].streams.close()


async def _sweep(responses: ResponseStore) -> None:
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        responses.expire()


async def _expect(request: web.Request) -> None:
    """Defer `100 Continue` to gateway.http.body, which sends it after authorization; other expectations fail."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed
