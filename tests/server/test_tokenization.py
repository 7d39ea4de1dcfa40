"""/tokenize, /detokenize and /tokenizer_info, in the shapes of vLLM's answers."""

import pytest
from fake_llm import BOS, MAX_MODEL_LEN, VOCAB_SIZE
from scripted_llm import TEMPLATE, ScriptedLLM

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "ping"}}


@pytest.fixture
def llm():
    return ScriptedLLM()


async def tokenize(http, **fields):
    response = await http.post("/tokenize", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_text(http):
    expected = {"count": 4, "max_model_len": MAX_MODEL_LEN, "token_strs": None}
    assert await tokenize(http, prompt="a b") == {"tokens": [BOS, 97, 32, 98], **expected}
    named = await tokenize(http, model="fake", prompt="a b", return_token_strs=True)
    assert named["token_strs"] == ["<bos>", "a", "_", "b"]
    bare = await tokenize(http, prompt="a b", add_special_tokens=False)
    assert (bare["count"], bare["tokens"]) == (3, [97, 32, 98])


async def test_a_conversation_with_tools(http, llm):
    found = await tokenize(http, messages=[USER, USER], tools=[TOOL])
    assert (found["count"], found["tokens"]) == (2, [0, 1])
    messages, tools, _ = llm.conversation
    assert messages == [USER, USER]
    assert [tool["function"]["name"] for tool in tools] == ["ping"]


async def test_tokens_become_the_text_again(http):
    tokens = (await tokenize(http, prompt="h\u00e9, \U0001f642"))["tokens"]
    response = await http.post("/detokenize", json={"model": "fake", "tokens": tokens})
    assert response.json() == {"prompt": "<bos>h\u00e9, \U0001f642"}
    assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_the_tokenizer_is_described(http):
    info = (await http.get("/tokenizer_info")).json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<bos>", "<eos>", None)
    assert info["added_tokens_decoder"]["1"] == {"content": "<eos>", "special": True}
    assert info["chat_template"] == TEMPLATE
    assert (info["model_max_length"], info["vocab_size"]) == (MAX_MODEL_LEN, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, None),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, None),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"promt": "a"}, 400, "promt"),
        ("/tokenize", {"prompt": "a" * MAX_MODEL_LEN}, 400, "prompt"),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model"),
        ("/tokenize", {"messages": [USER], "tools": [TOOL, TOOL]}, 400, "tools"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"model": "other", "tokens": []}, 404, "model"),
    ],
)
async def test_what_is_refused(http, path, body, status, param):
    response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
