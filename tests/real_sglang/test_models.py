"""A router in front of servers of different models: one that generates and one that embeds."""

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from .client import PROMPT, chat_body, post
from .cluster import Router, SGLangServer
from .conftest import Pair, StartRouter, StartServer
from .kit import MODEL_NAME

pytestmark = pytest.mark.real_sglang

EMBEDDING_MODEL = "tiny-embedding"


@pytest.fixture(scope="module")
def embedding_server(start_server: StartServer) -> SGLangServer:
    server = start_server("embedding", "--is-embedding", "--served-model-name", EMBEDDING_MODEL)
    server.wait_ready()
    return server


@pytest.fixture
def mixed(pair: Pair, embedding_server: SGLangServer, start_router: StartRouter) -> Router:
    return start_router(pair[0], embedding_server)


@pytest.fixture
def sdk(mixed: Router) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{mixed.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_models_are_those_of_all_servers(sdk: OpenAI) -> None:
    assert {model.id for model in sdk.models.list()} == {MODEL_NAME, EMBEDDING_MODEL}


def test_an_unknown_model_is_not_found_and_reaches_no_server(
    sdk: OpenAI, pair: Pair, embedding_server: SGLangServer
) -> None:
    path = "/v1/chat/completions"
    servers = (pair[0], embedding_server)
    before = [server.received(path) for server in servers]
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="nobody", messages=[{"role": "user", "content": PROMPT}])
    assert caught.value.code == "model_not_found"
    assert [server.received(path) for server in servers] == before


def test_a_request_goes_to_a_server_of_its_model(
    sdk: OpenAI, mixed: Router, pair: Pair, embedding_server: SGLangServer
) -> None:
    ids = {worker.url: worker.id for worker in mixed.workers().values()}
    for _ in range(3):
        chat = post(f"{mixed.url}/v1/chat/completions", chat_body(4))
        assert chat.headers["x-laneway-worker"] == ids[pair[0].url]
        embedding = sdk.embeddings.with_raw_response.create(model=EMBEDDING_MODEL, input=PROMPT)
        assert embedding.headers["x-laneway-worker"] == ids[embedding_server.url]


def test_an_embedding_is_the_servers_own(sdk: OpenAI, embedding_server: SGLangServer) -> None:
    body = {"model": EMBEDDING_MODEL, "input": PROMPT}
    (direct,) = post(f"{embedding_server.url}/v1/embeddings", body).json()["data"]
    answer = sdk.embeddings.create(model=EMBEDDING_MODEL, input=PROMPT, encoding_format="float")
    assert answer.data[0].embedding == pytest.approx(direct["embedding"], abs=1e-2)
    assert answer.usage.prompt_tokens == len(PROMPT)
