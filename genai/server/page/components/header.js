// The line above the conversation: its title, the model, and the buttons for dialogs.

import { change } from "../conversations.js";
import { html } from "../html.js";
import { set } from "../store.js";
import { ModelSelect } from "./settings.js";

export function Header({ state, head, title }) {
  const rename = (event) => change({ title: event.target.value.trim() || "Untitled" });
  return html`<header>
    <button type="button" class="narrow" aria-label="Conversations" aria-expanded=${state.isSidebarOpen}
      onClick=${() => set({ isSidebarOpen: true })}>☰</button>
    <h1 class="hidden">${title}</h1>
    ${state.current
      ? html`<input class="title" aria-label="Title of the conversation" value=${title} onChange=${rename} />`
      : html`<span class="title">${title}</span>`}
    <${ModelSelect} head=${head} models=${state.models} label="Model" />
    <button type="button" aria-label="Settings" onClick=${() => set({ panel: "settings" })}>
      <span class="wide">Settings</span><span class="narrow">⚙</span>
    </button>
    <button type="button" aria-label="Help" class="wide" onClick=${() => set({ panel: "help" })}>?</button>
  </header>`;
}
