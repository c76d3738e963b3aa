"""The routes of a simulated worker, by SGLang's paths and answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from time import time
from typing import Any, Final

import orjson

from router.contract import encode_report
from workers.sim import messages, reports, responses
from workers.sim.asks import (
    Api,
    BadAsk,
    conversation,
    no_such_model,
    read_ask,
    read_json,
    rule_broken,
    store_disabled,
)
from workers.sim.faults import BadFault, Faults, with_changes
from workers.sim.http_server import EVENTS, TEXT, Exchange
from workers.sim.intake import count_tokens
from workers.sim.worker import SimulatedWorker

# Paths that need no API key, with all that begin like them.
_OPEN: Final = ("/health", "/ready", "/metrics", "/fault")
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_FLUSHED: Final = (
    b"Cache flushed.\nPlease check backend logs for more details. (When there are running or "
    b"waiting requests, the operation will not be performed.)\n"
)
_INFERENCE: Final = {
    "/generate": Api.GENERATE,
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/embeddings": Api.EMBEDDINGS,
    "/v1/rerank": Api.RERANK,
    "/v1/messages": Api.MESSAGES,
    "/v1/responses": Api.RESPONSES,
}

# Where a server with a store of responses would look for one.
_STORED: Final = re.compile(r"(GET /v1/responses/[^/]+|POST /v1/responses/[^/]+/cancel)")

Route = Callable[[Exchange], None]


class Routes:
    """Finds and runs the handler of a request. `die` is what kills the worker."""

    def __init__(self, worker: SimulatedWorker, die: Callable[[], None]) -> None:
        self._worker = worker
        self._die = die
        self._held: list[Exchange] = []  # requests that came while the worker hangs
        release = tuple(int(part) for part in worker.options.sglang_version.split(".")[:3])
        self._release = release
        self._table = self._inference() | self._operations()
        if release < reports.READY_SINCE:
            del self._table["/ready"]
        if release < reports.LOADS_SINCE:
            del self._table["/v1/loads"]
        if release <= reports.GET_LOAD_UNTIL:
            self._table["/get_load"] = {"GET": self._get_load}

    def _inference(self) -> dict[str, dict[str, Route]]:
        table: dict[str, dict[str, Route]] = {}
        for path, api in _INFERENCE.items():
            route = self._infer(api)
            table[path] = {"POST": route, "PUT": route} if api is Api.GENERATE else {"POST": route}
        return table

    def _operations(self) -> dict[str, dict[str, Route]]:
        def model_info(exchange: Exchange) -> None:
            _json(exchange, self._model_info())

        def server_info(exchange: Exchange) -> None:
            _json(exchange, self._server_info())

        return {
            "/": {"GET": lambda exchange: _json(exchange, "SGLang is running")},
            "/health": {"GET": self._health},
            "/health_generate": {"GET": self._alive},
            "/ready": {"GET": self._alive},
            "/ping": {"GET": self._alive},
            "/v1/models": {"GET": lambda exchange: _json(exchange, self._models())},
            "/model_info": {"GET": model_info},
            "/get_model_info": {"GET": model_info},
            "/server_info": {"GET": server_info},
            "/get_server_info": {"GET": server_info},
            "/v1/loads": {"GET": self._loads},
            "/metrics": {"GET": self._metrics},
            "/v1/tokenize": {"POST": self._tokenize},
            "/tokenize": {"POST": self._tokenize},
            "/v1/messages/count_tokens": {"POST": self._count_tokens},
            "/abort_request": {"POST": self._abort},
            "/flush_cache": {"GET": self._flush, "POST": self._flush},
            "/slow_down": {"GET": self._slow_down, "POST": self._slow_down},
            "/fault": {"GET": self._fault, "POST": self._fault, "DELETE": self._fault},
        }

    def __call__(self, exchange: Exchange) -> None:
        """Serve `exchange`."""
        if self._worker.faults.hang and exchange.path != "/fault":
            self._held = [one for one in self._held if not one.ended] + [exchange]
            return
        if not self._authorized(exchange):
            exchange.respond(401, b'{"error":"Unauthorized"}')
            return
        methods = self._table.get(exchange.path)
        if methods is not None and exchange.method not in methods:
            allow = f"allow: {', '.join(methods)}\r\n"
            exchange.respond(405, b'{"detail":"Method Not Allowed"}', extra=allow)
            return
        try:
            (self._other if methods is None else methods[exchange.method])(exchange)
        except BadAsk as bad:
            _refuse(exchange, bad)

    def _authorized(self, exchange: Exchange) -> bool:
        key = self._worker.options.api_key
        if key is None or exchange.path.startswith(_OPEN):
            return True
        return exchange.headers.get("authorization") == f"Bearer {key}"

    def _other(self, exchange: Exchange) -> None:
        if _STORED.fullmatch(f"{exchange.method} {exchange.path}"):
            raise store_disabled("response_id")
        prefix = "/v1/models/"
        if not exchange.path.startswith(prefix) or exchange.method != "GET":
            exchange.respond(404, b'{"detail":"Not Found"}')
            return
        name = exchange.path.removeprefix(prefix)
        if name == self._worker.options.model:
            _json(exchange, self._models()["data"][0])
            return
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        exchange.respond(404, orjson.dumps({"error": error}))

    # -- inference --------------------------------------------------------------------------

    def _infer(self, api: Api) -> Route:
        def route(exchange: Exchange) -> None:
            worker = self._worker
            deadly = worker.faults.kill_after_requests
            if deadly is not None and worker.requests_total + 1 >= deadly:
                self._die()
            elif worker.draws_error():
                exchange.respond(500, b"Internal Server Error", TEXT)
            else:
                ask = read_ask(api, exchange.body)
                if api is Api.RESPONSES and not self._serves(ask.model):
                    raise no_such_model(ask.model)
                worker.serve(exchange, ask)

        return route

    def _serves(self, model: str) -> bool:
        """Whether `model`, or what a LoRA adapter is asked of, is served here."""
        own = self._worker.options.model
        return model == own or model.partition(":")[0] == own

    def _count_tokens(self, exchange: Exchange) -> None:
        ask = conversation(read_json(exchange.body))
        count = ask.extra_tokens + sum(map(count_tokens, ask.prompts))
        _json(exchange, {"input_tokens": count})

    def _tokenize(self, exchange: Exchange) -> None:
        prompt = read_json(exchange.body).get("prompt")
        if not isinstance(prompt, str):
            raise rule_broken("prompt should be a string.")
        count = count_tokens(prompt.encode("utf-8", "replace"))
        most = self._worker.options.context_length
        _json(exchange, {"tokens": list(range(count)), "count": count, "max_model_len": most})

    # -- health and load --------------------------------------------------------------------

    def _alive(self, exchange: Exchange) -> None:
        exchange.respond(503 if self._worker.draining else 200, b"", None)

    def _health(self, exchange: Exchange) -> None:
        if self._worker.options.sglang_health:
            self._alive(exchange)
            return
        report = reports.load_report(self._worker.snapshot(), now=self._worker.monotonic())
        exchange.respond(200, encode_report(report))

    def _loads(self, exchange: Exchange) -> None:
        include = exchange.query.get("include", "all").split(",")
        rank = exchange.query.get("dp_rank")
        if set(include) - {*reports.SECTIONS, "all"}:
            exchange.respond(500, b"Internal Server Error", TEXT)  # as SGLang does
            return
        if rank is not None and not rank.isdecimal():
            raise rule_broken("dp_rank should be a valid integer.")
        body = reports.loads(
            self._worker.snapshot(),
            version=self._worker.options.sglang_version,
            release=self._release,
            include=include,
            dp_rank=None if rank is None else int(rank),
            answered_at=time(),
        )
        if exchange.query.get("format") == "prometheus":
            exchange.respond(200, reports.prometheus_loads(body).encode(), _METRICS_TYPE)
        else:
            _json(exchange, body)

    def _get_load(self, exchange: Exchange) -> None:
        _json(exchange, reports.get_load(self._worker.snapshot()))

    def _metrics(self, exchange: Exchange) -> None:
        text = reports.metrics(self._worker.snapshot(), self._worker.options.model)
        exchange.respond(200, text.encode(), _METRICS_TYPE)

    # -- what it is -------------------------------------------------------------------------

    def _models(self) -> dict[str, Any]:
        options = self._worker.options
        model = {
            "id": options.model,
            "object": "model",
            "created": int(time()),
            "owned_by": "sglang",
            "root": options.model,
            "parent": None,
            "max_model_len": options.context_length,
        }
        return {"object": "list", "data": [model]}

    def _model_info(self) -> dict[str, Any]:
        options = self._worker.options
        return {
            "model_path": options.model,
            "served_model_name": options.model,
            "tokenizer_path": options.model,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "load_format": "dummy",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
        }

    def _server_info(self) -> dict[str, Any]:
        options, engine = self._worker.options, self._worker.options.engine
        snapshot = self._worker.snapshot()
        return {
            "model_path": options.model,
            "served_model_name": options.model,
            "tokenizer_path": options.model,
            "context_length": options.context_length,
            "max_running_requests": engine.max_running_requests,
            "max_queued_requests": engine.max_queued_requests,
            "enable_priority_scheduling": engine.enable_priority_scheduling,
            "schedule_low_priority_values_first": engine.schedule_low_priority_values_first,
            "priority_scheduling_preemption_threshold": (
                engine.priority_scheduling_preemption_threshold
            ),
            "schedule_policy": "fcfs",
            "chunked_prefill_size": options.profile.chunk_tokens,
            "page_size": 1,
            "tp_size": 1,
            "dp_size": 1,
            "disaggregation_mode": "null",
            "api_key": options.api_key,  # in clear, as SGLang: a router must not pass this on
            "status": "ready",
            "max_total_num_tokens": options.profile.kv_total_tokens,
            "max_req_input_len": options.context_length - 6,
            "kv_events": None,
            "internal_states": [
                {
                    "last_gen_throughput": snapshot.tokens_per_s,
                    "memory_usage": {"token_capacity": options.profile.kv_total_tokens},
                    "effective_max_running_requests_per_dp": engine.max_running_requests,
                }
            ],
            "version": options.sglang_version,
            "frontend": "python",
        }

    # -- operations -------------------------------------------------------------------------

    def _abort(self, exchange: Exchange) -> None:
        body = read_json(exchange.body or b"{}")
        rid = body.get("rid")
        if body.get("abort_all") is True:
            self._worker.abort_all()
        elif isinstance(rid, str):
            self._worker.abort(rid)
        exchange.respond(200, b"", None)

    def _flush(self, exchange: Exchange) -> None:
        if self._worker.flush_cache():
            exchange.respond(200, _FLUSHED, None)
        else:
            exchange.respond(400, b"Flush cache failed.\n", None)

    def _slow_down(self, exchange: Exchange) -> None:
        pause_s = read_json(exchange.body).get("forward_sleep_time")
        known = isinstance(pause_s, int | float) and not isinstance(pause_s, bool)
        if pause_s is not None and not (known and 0 <= pause_s < 3600):
            raise rule_broken("forward_sleep_time should be a valid number.")
        self._worker.slow_down(pause_s)
        exchange.respond(200, b"null")

    def _fault(self, exchange: Exchange) -> None:
        """GET: the faults; POST: change some; DELETE: back to health."""
        worker = self._worker
        try:
            if exchange.method == "POST":
                worker.set_faults(with_changes(worker.faults, read_json(exchange.body)))
            elif exchange.method == "DELETE":
                worker.set_faults(Faults())
        except BadFault as bad:
            raise rule_broken(str(bad)) from bad
        _json(exchange, worker.faults)
        if not worker.faults.hang:
            held, self._held = self._held, []
            for waiting in held:
                if not waiting.ended:
                    self(waiting)


def _json(exchange: Exchange, document: Any) -> None:
    exchange.respond(200, orjson.dumps(document))


def _refuse(exchange: Exchange, bad: BadAsk) -> None:
    body = orjson.dumps(bad.body)
    if exchange.path.startswith("/v1/messages"):
        exchange.respond(bad.status, messages.error_body("invalid_request_error", bad.brief or ""))
    elif exchange.path.startswith("/v1/responses"):
        exchange.respond(bad.status, responses.error_body(bad.body))
    elif bad.streamed:
        exchange.start(EVENTS)
        exchange.write(b"data: " + body + b"\n\n")
        exchange.write(b"data: [DONE]\n\n")
        exchange.finish()
    else:
        exchange.respond(400, body)
