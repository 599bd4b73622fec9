"""The application: its routes with their scopes, and the objects that they need."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from aiohttp import web

from gateway.api.anthropic import routes as messages
from gateway.api.anthropic.answers import MessageAnswer, ModelInfoAnswer, ModelPageAnswer, TokenCountAnswer
from gateway.api.anthropic.fields import ConversationFields, MessagesFields
from gateway.api.anthropic.models import ModelsQuery
from gateway.api.common import ops
from gateway.api.common.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from gateway.api.common.resumable import resume_stream
from gateway.api.openai import answers, models, tokenize
from gateway.api.openai.chat import chat_completions
from gateway.api.openai.completions import completions
from gateway.api.openai.embeddings import EmbeddingFields, embeddings
from gateway.api.responses import routes as responses
from gateway.api.responses.answers import (
    InputItemsAnswer,
    InputTokensAnswer,
    ResponseAnswer,
    ResponseDeletedAnswer,
    ResponseEvent,
)
from gateway.api.responses.fields import InputTokensFields, ItemsQuery, ResponseFields, RetrieveQuery
from gateway.http.app_keys import SERVICES, Services
from gateway.http.auth import Scope
from gateway.http.route import BetaQuery, Route
from gateway.middleware import Middleware
from gateway.openapi import ROUTE_TABLE, openapi
from gateway.siblings import relayed
from gateway.stores.responses import ResponseStore

_SWEEP_SECONDS = 30.0


_get = partial(Route, "GET", scope=Scope.INFERENCE)
_post = partial(Route, "POST", scope=Scope.INFERENCE)
_delete = partial(Route, "DELETE", scope=Scope.INFERENCE)
_public = partial(Route, "GET", scope=Scope.PUBLIC)

_RESPONSE_EVENTS: dict[str, Any] = {"streams": True, "events": ResponseEvent}

FOLLOW_UPS = (
    _delete("/v1/requests/{id}", ops.abort_request, answers.AbortAnswer),
    _get("/v1/responses/{id}", responses.get_response, ResponseAnswer, **_RESPONSE_EVENTS, query=RetrieveQuery),
    _delete("/v1/responses/{id}", responses.delete_response, ResponseDeletedAnswer),
    _post("/v1/responses/{id}/cancel", responses.cancel_response, ResponseAnswer),
    _get("/v1/responses/{id}/input_items", responses.list_input_items, InputItemsAnswer, query=ItemsQuery),
    _get("/v1/streams/{id}", resume_stream, "text/event-stream", headers=("Last-Event-ID",)),
)
"""Routes that are forwarded to the gateway process that holds the object which the id names."""

_GENERATES: dict[str, Any] = {"streams": True, "admitted": True}

ROUTES = (
    _post("/v1/chat/completions", chat_completions, answers.ChatAnswer, ChatFields, **_GENERATES),
    _post("/v1/completions", completions, answers.CompletionAnswer, CompletionFields, **_GENERATES),
    _post("/v1/embeddings", embeddings, answers.EmbeddingAnswer, EmbeddingFields, admitted=True),
    _post("/v1/chat/completions/render", tokenize.render_chat, answers.RenderAnswer, ChatFields),
    _post("/v1/completions/render", tokenize.render_completion, answers.RenderAnswer, CompletionFields),
    _post("/v1/messages", messages.create_message, MessageAnswer, MessagesFields, **_GENERATES, query=BetaQuery),
    _post("/v1/messages/count_tokens", messages.count_tokens, TokenCountAnswer, ConversationFields, query=BetaQuery),
    _post(
        "/v1/responses", responses.create_response, ResponseAnswer, ResponseFields, **_RESPONSE_EVENTS, admitted=True
    ),
    _post("/v1/responses/input_tokens", responses.count_input_tokens, InputTokensAnswer, InputTokensFields),
    _get(
        "/v1/models", models.list_models, answers.ModelListAnswer, anthropic_answer=ModelPageAnswer, query=ModelsQuery
    ),
    _get(
        "/v1/models/{model:.+}",
        models.get_model,
        answers.ModelAnswer,
        anthropic_answer=ModelInfoAnswer,
        query=BetaQuery,
    ),
    _post("/tokenize", tokenize.tokenize, answers.TokenizeAnswer, TokenizeFields),
    _post("/detokenize", tokenize.detokenize, answers.DetokenizeAnswer, DetokenizeFields),
    _public("/health", ops.health, answers.StatusAnswer),
    _public("/ready", ops.ready, answers.StatusAnswer, failures=(503,)),
    _public("/version", ops.version, answers.VersionAnswer),
    _public("/openapi.json", openapi),
    # Links to the page may carry query parameters of visit counters.
    _public("/", ops.page, "text/html", query=None),
    _public("/page/{file}", ops.page_file, "text/javascript"),
    # On a server with keys any key may read it (Prometheus: `authorization`); on an open server, everyone.
    _get("/metrics", ops.metrics, "text/plain"),
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
        for method in route.methods:
            added = app.router.add_route(method, route.path, route.handler, expect_handler=_expect)
            registered[added] = route
    app.on_response_prepare.append(around.add_headers)
    app[SERVICES] = services
    app.cleanup_ctx.append(_stores)
    return app


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
