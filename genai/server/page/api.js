// Requests to the server. The API key is stored for the tab only.

const KEY = "genai-key";

export const getKey = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

/** An error of a request. `status` is 0 if the server does not answer. */
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (getKey()) headers.authorization = `Bearer ${getKey()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const { message, code } = body.error ?? {};
  throw new ApiError(message ?? `The server answered with status ${response.status}.`, response.status, code);
}

/** Return the models that generate text, and their adapters. */
export async function listModels() {
  const { data } = await (await request("v1/models", { signal: AbortSignal.timeout(8000) })).json();
  const isEncoder = ({ capabilities = [] }) => capabilities.includes("embedding") || capabilities.includes("rerank");
  return data.filter((one) => !isEncoder(one));
}

/** Start a reply. The server continues it under the name `stream` if this page is closed. */
export async function startReply(stream, body, signal) {
  const headers = { "content-type": "application/json", "x-stream-id": stream };
  return request("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Read a reply again from its beginning. */
export const resumeReply = (stream, signal) => request(`v1/streams/${stream}`, { signal });

/** End a reply. */
export const stopReply = (stream) => request(`v1/streams/${stream}`, { method: "DELETE" }).catch(() => null);

/** Yield the chunks of a response. Raises ApiError if the stream ends early or with an error. */
export async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection to the server was lost.", 0);
      });
      if (done) throw new ApiError("The connection to the server was lost.", 0);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
        if (data === "[DONE]") return;
        if (data === undefined) continue; // a comment
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message, 500, chunk.error.code);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => null);
  }
}
