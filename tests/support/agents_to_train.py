"""Agents for tests: functions named in `rollout.episode.agent`. They use only the `openai` client."""

import asyncio
import sys
import threading
from typing import Any

import httpx2
import openai

SEEN: list[Any] = []  # what they left for a test to look at
HOLD = threading.Event()  # what those that hang wait for


def converse(base_url, api_key, model, prompt, num_turns=2):
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": prompt}]
        for _ in range(num_turns):
            message = client.chat.completions.create(model=model, messages=messages).choices[0].message
            messages += [message, {"role": "user", "content": "Again."}]
    return len(message.content) / 4


async def converse_async(base_url, api_key, model, messages):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = list(messages)
        for _ in range(2):
            message = (await client.chat.completions.create(model=model, messages=messages)).choices[0].message
            messages += [message.model_dump(), {"role": "user", "content": "Again."}]
    return True


def parallel(base_url, api_key, prompt):
    def ask(name):
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model=name, messages=[{"role": "user", "content": prompt + name}])

    threads = [threading.Thread(target=ask, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0.25


def unsaid(base_url, api_key, prompt):
    converse(base_url, api_key, "policy", prompt, 1)


def posted(base_url, api_key, prompt, given=None):
    converse(base_url, api_key, "policy", prompt, 1)
    headers = {"Authorization": "Bearer " + api_key}
    httpx2.post(base_url + "/reward", headers=headers, json={"reward": 0.75}).raise_for_status()
    return given


def posted_and_given(base_url, api_key, prompt):
    return posted(base_url, api_key, prompt, 0.5)


def wrong_type(base_url, api_key, prompt):
    converse(base_url, api_key, "policy", prompt, 1)
    return "right"


def crashes(base_url, api_key, prompt):
    converse(base_url, api_key, "policy", prompt, 1)
    if prompt == "crash":
        raise ValueError("an agent's own mistake")
    if prompt == "exit":
        sys.exit(3)
    if prompt == "stop":
        next(iter(()))
    return 1


async def leave(code):
    sys.exit(code)


async def crashes_async(prompt):
    if prompt == "exit":
        sys.exit(3)
    if prompt == "task":
        await asyncio.create_task(leave(4))
    if prompt == "callback":
        asyncio.get_running_loop().call_soon(sys.exit, 5)
        await asyncio.Event().wait()
    if prompt == "cancel":
        asyncio.current_task().cancel()
        await asyncio.sleep(0)
    raise ValueError("an agent's own mistake")


def silent():
    return 1.0


def named(question, hint, *, answer, item, prompt, messages, model, session_id, unknown=3):
    SEEN.append((question, hint, answer, item, prompt, messages, model, session_id, unknown))


def everything(**offered):
    SEEN.append(sorted(offered))


def wants_more(prompt, database):
    return 1.0


def hangs(base_url, api_key, prompt):
    try:
        converse(base_url, api_key, "policy", prompt, 1)
        HOLD.wait()
        converse(base_url, api_key, "policy", prompt, 1)
    except openai.APIStatusError as error:
        SEEN.append(error)


async def hangs_async(base_url, api_key, prompt):
    try:
        await converse_async(base_url, api_key, "policy", [{"role": "user", "content": prompt}])
    finally:
        SEEN.append("cancelled")


async def sleeps():
    try:
        await asyncio.Event().wait()
    finally:
        SEEN.append("cancelled")


def blocks(prompt):
    SEEN.append(prompt)
    HOLD.wait()


async def threads_async(base_url, api_key, prompt):
    if prompt == "hang":
        SEEN.append(prompt)
        await asyncio.to_thread(HOLD.wait)
    await asyncio.to_thread(converse, base_url, api_key, "policy", prompt, 1)
    return 1.0


def two(base_url, api_key, prompt):
    converse(base_url, api_key, "policy", prompt, 1)
    converse(base_url, api_key, "policy", "Once more: " + prompt, 2)
