// The whole page: the list of conversations, the open conversation, and the dialogs.

import { openNew } from "../conversations.js";
import { html, useEffect, useState } from "../html.js";
import { stop } from "../replies.js";
import { currentHead, getState, notify, set, subscribe } from "../store.js";
import { branch } from "../tree.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { Header } from "./header.js";
import { HelpDialog } from "./help.js";
import { KeyDialog } from "./key.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";

function useStore() {
  const [state, setState] = useState(getState());
  useEffect(() => {
    setState(getState()); // an action before this effect
    return subscribe(setState);
  }, []);
  return state;
}

function onKey(event) {
  const { isSidebarOpen, panel, streaming } = getState();
  if (event.key === "Escape" && !panel && !event.defaultPrevented) {
    if (isSidebarOpen) set({ isSidebarOpen: false });
    else for (const id of Object.keys(streaming)) if (getState().messages[id]) stop(id);
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    openNew();
  } else if (event.altKey && event.code === "KeyB") {
    event.preventDefault();
    set({ isSidebarOpen: !isSidebarOpen });
  }
}

export function App() {
  const state = useStore();
  useEffect(() => {
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);
  const head = currentHead(state);
  const messages = branch(state.messages, head.leaf);
  const last = messages.at(-1);
  const title = state.current ? head.title : "New conversation";
  useEffect(() => {
    document.title = `${title} – genai`;
  }, [title]);
  return html`
    <a class="skip" href="#composer" onClick=${skip}>Skip to the message</a>
    <${Sidebar} heads=${state.heads} current=${state.current} isOpen=${state.isSidebarOpen} />
    <main>
      <${Header} state=${state} head=${head} title=${title} />
      <${Conversation}
        key=${state.current}
        messages=${messages}
        all=${state.messages}
        streaming=${state.streaming}
        editing=${state.editing}
      />
      <footer>
        <${Banner} server=${state.server} notice=${state.notice} />
        <${Composer} key=${state.current ?? "new"} running=${last && state.streaming[last.id] ? last.id : null} last=${last} />
      </footer>
    </main>
    ${state.panel === "settings" && html`<${Settings} head=${head} models=${state.models} />`}
    ${state.panel === "key" && html`<${KeyDialog} />`}
    ${state.panel === "help" && html`<${HelpDialog} />`}
  `;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("composer").focus();
}

const DOWN = "The server does not answer. You can read, write and export. The page tries again every few seconds.";

function Banner({ server, notice }) {
  return html`
    ${server === "down" && html`<p class="banner" role="status">${DOWN}</p>`}
    ${server === "locked" &&
    html`<p class="banner" role="status">
      The server needs an API key. <button type="button" onClick=${() => set({ panel: "key" })}>Enter the key</button>
    </p>`}
    ${notice &&
    html`<p class="banner" role="alert">
      ${notice} <button type="button" aria-label="Close this notice" onClick=${() => notify(null)}>Close</button>
    </p>`}
  `;
}
