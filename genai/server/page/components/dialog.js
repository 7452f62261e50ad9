// A dialog. The browser keeps the focus inside, and closes it with Escape.

import { html, useEffect, useRef } from "../html.js";
import { set } from "../store.js";

export function Dialog({ title, children }) {
  const dialog = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${dialog} aria-label=${title} onClose=${() => set({ panel: null })}>
    <div class="row">
      <h2>${title}</h2>
      <span class="space"></span>
      <button type="button" aria-label="Close" onClick=${() => dialog.current.close()}>✕</button>
    </div>
    ${children}
  </dialog>`;
}
