// The dialog with the keys.

import { html } from "../html.js";
import { Dialog } from "./dialog.js";

const KEYS = [
  ["Enter", "Send the message"],
  ["Shift + Enter", "Begin a new line"],
  ["↑ in an empty field", "Edit the last message"],
  ["Escape", "Stop the reply; close a dialog or an editor"],
  ["Alt + N", "New conversation"],
  ["Alt + B", "Show or hide the list of conversations"],
];

export function HelpDialog() {
  return html`<${Dialog} title="Keys">
    <table class="keys">
      <tbody>
        ${KEYS.map(([key, effect]) => html`<tr><th scope="row"><kbd>${key}</kbd></th><td>${effect}</td></tr>`)}
      </tbody>
    </table>
    <p class="note">Conversations are stored in this browser only. “Export all” writes them to a file.</p>
  <//>`;
}
