// One message, with its branches and its buttons.

import { edit, retry, switchBranch } from "../conversations.js";
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { listen, liveText } from "../live.js";
import { copyText, MarkdownWriter } from "../markdown.js";
import { modelState } from "../server.js";
import { set } from "../store.js";

const STATE_MS = 1000; // while a reply is awaited, the state of its model is read at this interval

export function Message({ message, siblings, isStreaming, isEditing }) {
  // The same object makes preact skip a message that has not changed.
  return useMemo(() => {
    const isUser = message.role === "user";
    return html`<article class=${`message ${message.role}`} aria-label=${isUser ? "You" : "Reply"} aria-busy=${isStreaming}>
      ${isUser
        ? html`<${Question} message=${message} isEditing=${isEditing} />`
        : html`<${Reply} message=${message} isStreaming=${isStreaming} />`}
      ${!isEditing && !isStreaming && html`<${Tools} message=${message} siblings=${siblings} isUser=${isUser} />`}
    </article>`;
  }, [message, isStreaming, isEditing, siblings.indexOf(message), siblings.length]);
}

function Question({ message, isEditing }) {
  const files = message.attachments ?? [];
  return html`
    ${files.length > 0 &&
    html`<ul class="files">
      ${files.map(
        ({ name, text }) => html`<li><details><summary>${name}</summary><pre tabindex="0">${text}</pre></details></li>`,
      )}
    </ul>`}
    ${isEditing ? html`<${Editor} message=${message} />` : html`<div class="text">${message.content}</div>`}
  `;
}

function Editor({ message }) {
  const area = useRef(null);
  useEffect(() => {
    area.current.focus();
    area.current.style.height = `${Math.min(area.current.scrollHeight + 4, 400)}px`;
  }, []);
  const cancel = () => {
    set({ editing: null });
    document.getElementById("composer")?.focus();
  };
  const submit = () => {
    const content = area.current.value;
    if (content.trim() || message.attachments?.length) {
      edit(message, content);
      document.getElementById("composer")?.focus();
    }
  };
  const onKeyDown = (event) => {
    if (event.key === "Escape") {
      event.preventDefault();
      cancel();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  };
  return html`<div class="editor">
    <textarea ref=${area} aria-label="Edit the message" defaultValue=${message.content} onKeyDown=${onKeyDown}></textarea>
    <div class="row">
      <button type="button" class="primary" onClick=${submit}>Send as a new branch</button>
      <button type="button" onClick=${cancel}>Cancel</button>
    </div>
  </div>`;
}

function Reply({ message, isStreaming }) {
  const body = useRef(null);
  const [phase, setPhase] = useState(null); // while a reply is received: "waiting", "reasoning" or "text"
  const reasoning = useRef(null);
  useEffect(() => {
    const writer = new MarkdownWriter(body.current);
    const end = (content) => {
      writer.writeUpTo(content);
      writer.end();
    };
    if (!isStreaming) return end(message.content);
    if (!liveText(message.id)) setPhase("waiting");
    let shown = writer;
    const write = (text) => {
      setPhase(text.content ? "text" : text.reasoning ? "reasoning" : "waiting");
      if (reasoning.current && reasoning.current.textContent.length !== text.reasoning.length) {
        reasoning.current.textContent = text.reasoning;
      }
      // After a lost connection, the reply is read again from its beginning.
      if (text.content.length < shown.length) shown = new MarkdownWriter(body.current);
      shown.writeUpTo(text.content);
    };
    return listen(message.id, write);
  }, [message.id, isStreaming, isStreaming ? "" : message.content]);
  const isLoading = useIsLoading(message.model, isStreaming && phase === "waiting");
  const awaited = isLoading ? "Loading the model" : "Waiting";
  const hasReasoning = phase === "reasoning" || message.reasoning || liveText(message.id)?.reasoning;
  return html`
    ${hasReasoning &&
    html`<details class="reasoning">
      <summary>Reasoning</summary>
      <div ref=${reasoning}>${isStreaming ? liveText(message.id)?.reasoning : message.reasoning}</div>
    </details>`}
    <div class="markdown" ref=${body}></div>
    ${isStreaming && phase !== "text" && html`<p class="waiting">${phase === "reasoning" ? "Reasoning" : awaited}…</p>`}
    ${!isStreaming && html`<${Ending} message=${message} />`}
  `;
}

/** Return true while a reply is awaited because its model is being loaded. */
function useIsLoading(model, isAwaited) {
  const [isLoading, setIsLoading] = useState(false);
  useEffect(() => {
    setIsLoading(false);
    if (!isAwaited) return undefined;
    let isCurrent = true;
    const timer = setInterval(async () => {
      const state = await modelState(model);
      if (isCurrent) setIsLoading(state === "loading");
    }, STATE_MS);
    return () => {
      isCurrent = false;
      clearInterval(timer);
    };
  }, [model, isAwaited]);
  return isLoading;
}

const ENDS = {
  length: "The reply reached its maximum length.",
  stopped: "You stopped the reply.",
};

function Ending({ message }) {
  const { error, status, finish, usage, model } = message;
  if (status === "failed") return html`<p class="error" role="alert">${error}</p>`;
  const reason = status === "stopped" ? ENDS.stopped : ENDS[finish];
  return html`
    ${reason && html`<p class="note">${reason}</p>`}
    <p class="note costs">${[model, ...(usage ? costs(usage) : [])].filter(Boolean).join(" · ")}</p>
  `;
}

function costs({ tokens, speed, first, prompt, cached }) {
  return [
    `${tokens} tokens`,
    speed > 0 && `${speed.toFixed(1)} tokens/s`,
    first > 0 && `first after ${first.toFixed(2)} s`,
    `${cached} of ${prompt} prompt tokens cached`,
  ];
}

function Tools({ message, siblings, isUser }) {
  const index = siblings.indexOf(message);
  return html`<div class="tools">
    ${siblings.length > 1 &&
    html`<span class="branches" role="group" aria-label="Branches">
      <button type="button" aria-label="Previous branch" disabled=${index === 0} onClick=${() => switchBranch(message, -1)}>‹</button>
      <span>${index + 1} / ${siblings.length}</span>
      <button type="button" aria-label="Next branch" disabled=${index === siblings.length - 1} onClick=${() => switchBranch(message, 1)}>›</button>
    </span>`}
    <button type="button" onClick=${(event) => copyText(message.content, event.currentTarget)}>Copy</button>
    ${isUser
      ? html`<button type="button" onClick=${() => set({ editing: message.id })}>Edit</button>`
      : html`<button type="button" onClick=${() => retry(message)}>Retry</button>`}
  </div>`;
}
