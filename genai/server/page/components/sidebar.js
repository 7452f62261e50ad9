// The list of conversations, with search, export and import.

import { deleteConversation, open, openNew } from "../conversations.js";
import { html, useRef, useState } from "../html.js";
import { notify, set } from "../store.js";
import { chooseTheme, getTheme } from "../theme.js";
import { download, importText } from "../transfer.js";

const PAGE = 100; // a list of thousands of elements would make the page slow

export function Sidebar({ heads, current, isOpen }) {
  const [query, setQuery] = useState("");
  const [count, setCount] = useState(PAGE);
  const file = useRef(null);
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = heads.filter((one) => words.every((word) => one.title.toLowerCase().includes(word)));
  const load = async (event) => {
    const [chosen] = event.target.files;
    event.target.value = "";
    if (!chosen) return;
    set({ isSidebarOpen: false }); // on narrow screens, the list covers the notice
    try {
      const added = await importText(await chosen.text());
      notify(added === 1 ? "1 conversation was added." : `${added} conversations were added.`);
    } catch (error) {
      notify(error.message);
    }
  };
  return html`
    ${isOpen && html`<div class="shade" onClick=${() => set({ isSidebarOpen: false })}></div>`}
    <nav class=${isOpen ? "sidebar open" : "sidebar"} aria-label="Conversations">
      <div class="row">
        <button type="button" class="primary" onClick=${openNew}>New conversation</button>
        <button type="button" class="narrow" aria-label="Close the list" onClick=${() => set({ isSidebarOpen: false })}>✕</button>
      </div>
      <input type="search" placeholder="Search titles" aria-label="Search titles" value=${query}
        onInput=${(event) => setQuery(event.target.value)} />
      <ul>
        ${found.slice(0, count).map((head) => html`<${Entry} key=${head.id} head=${head} isOpen=${head.id === current} />`)}
      </ul>
      ${found.length > count &&
      html`<button type="button" onClick=${() => setCount(count + PAGE)}>Show more (${found.length - count})</button>`}
      <div class="row">
        <button type="button" onClick=${() => download()}>Export all</button>
        <button type="button" onClick=${() => file.current.click()}>Import</button>
        <input ref=${file} type="file" accept=".json,application/json" class="hidden" tabindex="-1" aria-hidden="true"
          data-file="import" onChange=${load} />
      </div>
      <label class="row">Theme <${ThemeSelect} /></label>
    </nav>
  `;
}

function ThemeSelect() {
  const [theme, setTheme] = useState(getTheme());
  const onChange = (event) => {
    chooseTheme(event.target.value);
    setTheme(event.target.value);
  };
  return html`<select class="space" value=${theme} onChange=${onChange}>
    <option value="light dark">As the system</option>
    <option value="light">Light</option>
    <option value="dark">Dark</option>
  </select>`;
}

function Entry({ head, isOpen }) {
  const [isAsking, setAsking] = useState(false);
  if (isAsking) {
    return html`<li class="asking">
      <span>Delete “${head.title}”?</span>
      <button type="button" class="danger" onClick=${() => deleteConversation(head.id)}>Delete</button>
      <button type="button" onClick=${() => setAsking(false)} ref=${(node) => node?.focus()}>Keep</button>
    </li>`;
  }
  return html`<li class=${isOpen ? "current" : ""}>
    <a href=${`#${head.id}`} aria-current=${isOpen ? "page" : null} onClick=${(event) => (event.preventDefault(), open(head.id))}>
      ${head.title}
    </a>
    <button type="button" aria-label=${`Export ${head.title}`} onClick=${() => download(head.id)}>↓</button>
    <button type="button" aria-label=${`Delete ${head.title}`} onClick=${() => setAsking(true)}>✕</button>
  </li>`;
}
