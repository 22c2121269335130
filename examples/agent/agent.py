"""Solve one problem with OpenAI's client, and a tool that adds numbers."""

import json
import os
import pathlib

from openai import OpenAI

record = json.loads(pathlib.Path(os.environ["RL_MEGATRON_RECORD"]).read_text())
function = {
    "name": "calculator",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
messages = [{"role": "user", "content": record["prompt"]}]
client, num_calls = OpenAI(), 0
for _ in range(4):
    tools = [{"type": "function", "function": function}]
    message = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        num_calls += 1
        try:
            expression = json.loads(call.function.arguments)["expression"]
            result = str(sum(int(number) for number in expression.split("+")))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            result = f"error: {error}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not message.tool_calls:
        break
result = {"reward": -0.1 * max(0, num_calls - 1), "metadata": {"calls": num_calls}}
pathlib.Path(os.environ["RL_MEGATRON_RESULT"]).write_text(json.dumps(result))
