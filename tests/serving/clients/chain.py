"""Use a server through LangChain's client for OpenAI: `python chain.py URL` prints `passed`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

ANSWER = "Hello! Ask me for a sum, a count or a story."


def main(url: str) -> None:
    """One answer, a conversation, streams, batches, several answers, and plain completions."""
    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "any", "model": "tiny", "max_retries": 0}
    chat = ChatOpenAI(temperature=0, **options)
    hello = chat.invoke("Hello")
    assert hello.content == ANSWER
    assert hello.usage_metadata is not None
    assert hello.usage_metadata["output_tokens"] == 19
    system, question = SystemMessage("You are a calculator."), HumanMessage("What is 12+30?")
    assert "42" in chat.invoke([system, HumanMessage("Hello"), AIMessage("Hello!"), question]).content
    assert "".join(str(piece.content) for piece in chat.stream("Hello")) == ANSWER

    async def at_once() -> list[str]:
        answers = await chat.abatch(["Hello", "What is 1+1?"])
        pieces = [piece async for piece in chat.astream("Hello", stream_usage=True)]
        assert any(piece.usage_metadata for piece in pieces)
        return [str(each.content) for each in answers] + ["".join(str(piece.content) for piece in pieces)]

    assert asyncio.run(at_once()) == [ANSWER, "1+1=2.", ANSWER]
    several = ChatOpenAI(n=2, seed=3, max_tokens=5, logprobs=True, top_logprobs=2, stop=["zz"], **options)
    (answers,) = several.generate([[HumanMessage("Hello")]]).generations
    assert len(answers) == 2
    assert len(answers[0].generation_info["logprobs"]["content"]) == 5
    plain = OpenAI(temperature=0, **options)
    assert plain.batch(["348+275=", "1+1="]) == ["623", "2"]
    assert "".join(plain.stream("348+275=")) == "623"
    print("passed")


if __name__ == "__main__":
    main(sys.argv[1])
