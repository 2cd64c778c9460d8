"""What a person needs when the server is ready: where it is, and something to paste."""

import json

from configs import Config
from scheduler.messages import EngineInfo

_QUESTION = "Why is the sky blue?"


def welcome(config: Config, url: str, info: EngineInfo | None, elapsed_seconds: float) -> str:
    """`url` is that of the application; `info` tells the size of the engine if that is known."""
    name = (*config.model.served_model_name, config.model.model)[0]
    has_keys = bool(config.server.api_keys)
    lines = [f"\n{name} is ready after {elapsed_seconds:.0f} s: {url}/v1\n"]
    if info is not None and info.max_model_len:
        lines.append(
            f"KV cache: {info.num_blocks} blocks of {info.block_size} tokens hold "
            f"{info.capacity_tokens} tokens, {info.capacity_tokens / info.max_model_len:.1f} "
            f"requests of the full length of {info.max_model_len}.\n"
        )
    lines += [_curl(url, name, has_keys), _python(url, name, has_keys)]
    lines.append("Ctrl-C stops the server.")
    return "\n".join(lines)


def _curl(url: str, name: str, has_keys: bool) -> str:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": _QUESTION}]})
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    return (
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{body}'\n"
    )


def _python(url: str, name: str, has_keys: bool) -> str:
    key = "KEY" if has_keys else "none"
    return (
        f"  from openai import OpenAI\n"
        f'  client = OpenAI(base_url="{url}/v1", api_key="{key}")\n'
        f"  answer = client.chat.completions.create(\n"
        f'      model="{name}", messages=[{{"role": "user", "content": "{_QUESTION}"}}]\n'
        f"  )\n"
        f"  print(answer.choices[0].message.content)\n"
    )
