// Replies: start them, receive them, and read them again after a reload or a lost connection.

import { ApiError, chunks, resumeReply, startReply, stopReply } from "./api.js";
import { save } from "./database.js";
import { removeLive, setLive } from "./live.js";
import { requestBody } from "./prompt.js";
import { checkServer } from "./server.js";
import { dispatch, getState, notifyUnsaved, say } from "./store.js";

const SAVE_MS = 2000; // a reply in progress is stored at this interval
const REST_MS = 30; // the page handles keys and frames at this interval while it reads a replay of many events
const RETRIES = 8;
const running = new Map(); // AbortControllers by message id

export const isRunning = (id) => running.has(id);

/** Request a reply to a branch, and receive it. */
export function generate(head, messages, reply) {
  const body = requestBody(head, messages);
  return receive(head.id, reply, (signal) => startReply(reply.id, body, signal));
}

/** Receive a reply that was in progress when the page was closed. */
export function resume(message) {
  if (running.has(message.id)) return null;
  return receive(message.conversation, message, null);
}

/** Stop a reply. Its text so far remains. */
export function stop(id) {
  stopReply(id);
  running.get(id)?.abort();
}

async function receive(conversation, reply, start) {
  const aborter = new AbortController();
  running.set(reply.id, aborter);
  dispatch({ type: "streaming", id: reply.id, isOn: true });
  say("The reply has started.");
  const end = { ...reply };
  try {
    await received(end, start, aborter.signal);
    end.status = end.finish ? "done" : "stopped";
  } catch (error) {
    const isStopped = error.name === "AbortError";
    end.status = isStopped ? "stopped" : "failed";
    if (!isStopped) end.error = error.message;
    if (error instanceof ApiError && (error.status === 0 || error.status === 401)) checkServer();
  }
  running.delete(reply.id);
  removeLive(reply.id);
  dispatch({ type: "message", message: end });
  dispatch({ type: "streaming", id: reply.id, isOn: false });
  // Another tab may have deleted the conversation.
  if (getState().heads.some((one) => one.id === conversation)) await save(null, [end]).catch(notifyUnsaved);
  if (getState().current === conversation) say(spoken(end));
}

function spoken({ status, error, content }) {
  if (status === "failed") return `The reply failed. ${error}`;
  const text = content.length > 1000 ? `${content.slice(0, 1000)} … The reply is longer.` : content;
  return `${status === "stopped" ? "The reply was stopped." : "The reply is complete."} ${text}`;
}

/** Read the chunks of a reply into `end`. After a lost connection, read the reply again from its beginning. */
async function received(end, start, signal) {
  let response = start ? await start(signal) : null;
  for (let attempt = 0; ; attempt += 1) {
    try {
      response ??= await resumeReply(end.id, signal);
      await readInto(end, response);
      return;
    } catch (error) {
      if (!(error instanceof ApiError) || signal.aborted) throw error;
      const isUnknown = error.status === 404;
      // Another tab may have stored the message just before it sends the request.
      const isEarly = isUnknown && !start && Date.now() - end.created < 3000;
      if (isUnknown && !isEarly) throw new ApiError("The reply was interrupted, and the server no longer has it.", 404);
      if ((error.status !== 0 && !isEarly) || attempt >= RETRIES) throw error;
      response = null;
      await pause(Math.min(200 * 2 ** attempt, 3000), signal);
    }
  }
}

async function readInto(end, response) {
  const text = { content: "", reasoning: "" };
  let saved = Date.now();
  let rested = Date.now();
  for await (const chunk of chunks(response)) {
    if (Date.now() - rested > REST_MS) {
      await new Promise((resolve) => setTimeout(resolve));
      rested = Date.now();
    }
    const [choice] = chunk.choices;
    text.content += choice?.delta.content ?? "";
    text.reasoning += choice?.delta.reasoning_content ?? "";
    if (choice?.finish_reason) end.finish = choice.finish_reason;
    if (chunk.usage) end.usage = costs(chunk);
    Object.assign(end, text);
    setLive(end.id, { ...text });
    if (Date.now() - saved > SAVE_MS) {
      saved = Date.now();
      save(null, [{ ...end }], { isQuiet: true }).catch(() => null);
    }
  }
}

function costs({ usage, timings = {} }) {
  return {
    prompt: usage.prompt_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    tokens: usage.completion_tokens,
    speed: timings.predicted_per_second ?? 0,
    first: (timings.prompt_ms ?? 0) / 1000,
  };
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("stopped", "AbortError"));
    });
  });
}
