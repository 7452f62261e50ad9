// The dialog for the settings of a conversation: model, system message, sampling options.

import { change } from "../conversations.js";
import { html, useRef } from "../html.js";
import { OPTIONS } from "../prompt.js";
import { set } from "../store.js";
import { Dialog } from "./dialog.js";

/** A list of the models and adapters. The selected model stays in it while the server does not have it. */
export function ModelSelect({ head, models, label }) {
  const names = models.map((one) => one.id);
  if (head.model && !names.includes(head.model)) names.push(head.model);
  const base = models[0]?.id;
  return html`<select aria-label=${label} class="model" value=${head.model || base || ""}
    onChange=${(event) => change({ model: event.target.value === base ? "" : event.target.value })}>
    ${names.map((name) => html`<option value=${name}>${nameOf(models, name)}</option>`)}
    ${names.length === 0 && html`<option value="">No model</option>`}
  </select>`;
}

function nameOf(models, name) {
  const model = models.find((one) => one.id === name);
  if (!model) return models.length ? `${name} (not on this server)` : name;
  return model.parent ? `${name} (adapter)` : name;
}

export function Settings({ head, models }) {
  const form = useRef(null);
  const selected = models.find((one) => one.id === head.model) ?? models[0];
  const submit = (event) => {
    event.preventDefault();
    const fields = new FormData(form.current);
    const options = {};
    for (const [name] of OPTIONS) if (fields.get(name)) options[name] = Number(fields.get(name));
    const values = { system: fields.get("system"), reasoning: fields.get("reasoning") ?? head.reasoning, options };
    change(values, { isDefault: fields.has("default") });
    set({ panel: null });
  };
  return html`<${Dialog} title="Settings">
    <form ref=${form} class="settings" onSubmit=${submit}>
      <label>System message
        <textarea name="system" rows="4" defaultValue=${head.system}></textarea>
      </label>
      ${selected?.capabilities?.includes("thinking") &&
      html`<label>Reasoning
        <select name="reasoning" defaultValue=${head.reasoning}>
          ${[["", "As the model's default"], ["none", "Off"], ["low", "Low"], ["medium", "Medium"], ["high", "High"]].map(
            ([value, text]) => html`<option value=${value} selected=${value === head.reasoning}>${text}</option>`,
          )}
        </select>
      </label>`}
      <fieldset>
        <legend>Sampling options</legend>
        <p class="note">An empty field has the default of the model.</p>
        <div class="options">
          ${OPTIONS.map(
            ([name, label, hint, attributes]) => html`<label>${label}
              <input name=${name} ...${attributes} defaultValue=${head.options[name] ?? ""} aria-describedby=${`hint-${name}`} />
              <span class="note" id=${`hint-${name}`}>${hint}</span>
            </label>`,
          )}
        </div>
      </fieldset>
      <label class="check"><input type="checkbox" name="default" /> Also use these settings for new conversations</label>
      <div class="row"><button type="submit" class="primary">Save</button></div>
    </form>
  <//>`;
}
