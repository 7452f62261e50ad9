// The JavaScript clients of OpenAI and Anthropic: chats, streams, tools, schemas, embeddings, responses, errors.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const { SERVER, LIMITED, KEY } = process.env;
const messages = [{ role: "user", content: "What is 12 + 7?" }];
const story = [{ role: "user", content: "Tell me a story about Luna and Tom." }];
const tooLong = [{ role: "user", content: "word ".repeat(3000) }];
const number = { type: "integer", minimum: 0, maximum: 99 };
const add = { type: "object", properties: { a: number, b: number }, required: ["a", "b"], additionalProperties: false };
const model = "pebble";

// Makes replies long: further tool calls follow the first.
const { eos_token_ids: ends } = await (await fetch(`${SERVER}/tokenizer_info`)).json();
const logit_bias = Object.fromEntries(ends.map((token) => [token, -100]));

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

async function counter(name, server = SERVER) {
  const answer = await fetch(`${server}/metrics`, { headers: { authorization: `Bearer ${KEY}` } });
  const line = (await answer.text()).split("\n").find((one) => one.startsWith(`${name}{`));
  return Number(line.split(" ").at(-1));
}

async function until(condition) {
  const end = Date.now() + 30_000;
  while (!(await condition())) {
    assert(Date.now() < end, "the condition did not become true");
    await sleep(20);
  }
}

async function cancels(work) {
  const before = await counter("genai_cancelled_total");
  await work();
  await until(async () => (await counter("genai_cancelled_total")) > before);
}

// Uses the only place of the key on LIMITED until the server has refused a request.
async function whileBusy(work) {
  const refused = await counter("genai_refused_total", LIMITED);
  const client = new OpenAI({ baseURL: `${LIMITED}/v1`, apiKey: KEY });
  let ends = false;
  const hold = async () => {
    while (!ends) {
      const body = { model, messages: story, ignore_eos: true, max_tokens: 900, stream: true };
      for await (const _ of await client.chat.completions.create(body)) if (ends) break;
    }
  };
  const holding = hold();
  await until(async () => (await counter("genai_requests_running", LIMITED)) > 0);
  const working = work();
  await until(async () => (await counter("genai_refused_total", LIMITED)) > refused);
  ends = true;
  await Promise.all([working, holding]);
}

async function chats(client) {
  const reply = await client.chat.completions.create({ model, messages });
  assert.equal(reply.choices[0].message.content, "19");
  const stream = await client.chat.completions.create({ model, messages, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, "19");
  assert.deepEqual(usage.total_tokens, reply.usage.total_tokens);
  const scored = await client.chat.completions.create({ model, messages, logprobs: true, top_logprobs: 2 });
  assert.equal(scored.choices[0].logprobs.content[0].top_logprobs.length, 2);
  const format = { type: "json_schema", json_schema: { name: "pair", schema: add, strict: true } };
  const made = await client.chat.completions.create({ model, messages, response_format: format });
  assert.deepEqual(Object.keys(JSON.parse(made.choices[0].message.content)), ["a", "b"]);
}

async function tools(client) {
  const body = {
    model, messages, tools: [{ type: "function", function: { name: "add", parameters: add } }],
    tool_choice: "required", logit_bias, seed: 1,
  };
  const { tool_calls: calls } = (await client.chat.completions.create(body)).choices[0].message;
  assert.equal(calls.length, 2);
  const last = await client.chat.completions.stream(body).finalChatCompletion();
  assert.equal(last.choices[0].finish_reason, "tool_calls");
  const named = (all) => all.map((call) => [call.id, call.function.name, call.function.arguments]);
  assert.deepEqual(named(last.choices[0].message.tool_calls), named(calls));
  let ran = 0;
  const runner = client.chat.completions.runTools(
    {
      model, messages, max_tokens: 60, tool_choice: { type: "function", function: { name: "add" } },
      tools: [{ type: "function", function: { name: "add", parameters: add, parse: JSON.parse, function: ({ a, b }) => (ran++, String(a + b)) } }],
    },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert(ran >= 1);
}

async function otherEndpoints(client) {
  const text = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 5, ignore_eos: true });
  assert.equal(text.usage.completion_tokens, 5);
  const vectors = await client.embeddings.create({ model: "bert", input: ["A cat.", "A dog."] });
  assert.equal(vectors.data.length, 2);
  assert(vectors.data[0].embedding.length > 8 && vectors.data[0].embedding.every(Number.isFinite));
  const response = await client.responses.create({ model, input: "What is 12 + 7?" });
  assert.equal(response.output_text, "19");
  const next = await client.responses.stream({ model, input: "What is 20 - 5?", previous_response_id: response.id }).finalResponse();
  assert.equal(next.output_text, "15");
  const models = await client.models.list();
  assert(models.data.some((one) => one.id === model));
}

async function anthropic(client) {
  const reply = await client.messages.create({ model, messages, max_tokens: 9 });
  assert.equal(reply.content[0].text, "19");
  const stream = client.messages.stream({ model, messages, max_tokens: 9 });
  assert.equal(await stream.finalText(), "19");
  const body = { model, messages, max_tokens: 300, logit_bias, seed: 1, tools: [{ name: "add", input_schema: add }], tool_choice: { type: "any" } };
  const whole = (await client.messages.create(body)).content.filter((block) => block.type === "tool_use");
  assert.equal(whole.length, 2);
  const streamed = (await client.messages.stream(body).finalMessage()).content.filter((block) => block.type === "tool_use");
  assert.deepEqual(streamed.map((block) => [block.id, block.input]), whole.map((block) => [block.id, block.input]));
  const { input_tokens: count } = await client.messages.countTokens({ model, messages });
  assert.equal(count, reply.usage.input_tokens + reply.usage.cache_read_input_tokens);
  await assert.rejects(client.messages.create({ model, messages: tooLong, max_tokens: 9 }), /prompt is too long/);
  await cancels(async () => {
    const long = client.messages.stream({ model, messages: story, max_tokens: 900, ignore_eos: true });
    for await (const event of long) if (event.type === "content_block_delta") break;
  });
}

async function errors(client) {
  const fails = (call, kind) => assert.rejects(call, (error) => error instanceof kind || assert.fail(String(error)));
  await fails(client.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ model, messages: tooLong, stream: true }), { code: "context_length_exceeded" });
  const locked = (options) => new OpenAI({ baseURL: `${LIMITED}/v1`, apiKey: KEY, ...options });
  await fails(locked({ apiKey: "wrong" }).chat.completions.create({ model, messages }), OpenAI.AuthenticationError);
  await whileBusy(() => fails(locked({ maxRetries: 0 }).chat.completions.create({ model, messages }), OpenAI.RateLimitError));
  await whileBusy(async () => {
    const reply = await locked({ maxRetries: 2 }).chat.completions.create({ model, messages });
    assert.equal(reply.choices[0].message.content, "19");
  });
  const long = { model, messages: story, max_tokens: 900, ignore_eos: true };
  await cancels(async () => {
    const ends = new AbortController();
    const running = client.chat.completions.create(long, { signal: ends.signal });
    until(async () => (await counter("genai_requests_running")) > 0).then(() => ends.abort());
    await assert.rejects(running);
  });
  await cancels(async () => {
    for await (const _ of await client.chat.completions.create({ ...long, stream: true })) break;
  });
}

const openai = new OpenAI({ baseURL: `${SERVER}/v1`, apiKey: "none" });
await chats(openai);
await tools(openai);
await otherEndpoints(openai);
await anthropic(new Anthropic({ baseURL: SERVER, apiKey: "none" }));
await errors(openai);
