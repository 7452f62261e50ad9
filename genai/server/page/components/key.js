// The dialog for the API key.

import { getKey, setKey } from "../api.js";
import { html, useRef } from "../html.js";
import { checkServer } from "../server.js";
import { set } from "../store.js";
import { Dialog } from "./dialog.js";

export function KeyDialog() {
  const input = useRef(null);
  const submit = (event) => {
    event.preventDefault();
    setKey(input.current.value.trim());
    set({ panel: null });
    checkServer();
  };
  return html`<${Dialog} title="API key">
    <form onSubmit=${submit}>
      <p>${getKey() ? "The server does not know this key." : "This server needs an API key."}</p>
      <label>API key
        <input ref=${input} type="password" autocomplete="off" defaultValue=${getKey()} required autofocus />
      </label>
      <p class="note">The key is stored until this tab is closed.</p>
      <button type="submit" class="primary">Use this key</button>
    </form>
  <//>`;
}
