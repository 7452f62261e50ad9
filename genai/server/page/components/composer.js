// The field for the next message. Its text is not in the page's state, so that a keystroke renders the field only.

import { send } from "../conversations.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../html.js";
import { stop } from "../replies.js";
import { getState, notify, set } from "../store.js";
import { attachment } from "../transfer.js";

export function Composer({ running, last }) {
  const [text, setText] = useState("");
  const [files, setFiles] = useState([]);
  const [isOver, setOver] = useState(false);
  const area = useRef(null);
  const input = useRef(null);

  useEffect(() => area.current.focus(), []);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight + 2, 240)}px`;
  }, [text]);

  const attach = async (chosen) => {
    for (const file of chosen) {
      try {
        const added = await attachment(file);
        setFiles((before) => [...before, added]);
      } catch (error) {
        notify(error.message);
      }
    }
  };
  const submit = () => {
    if (running || !(text.trim() || files.length)) return;
    setText("");
    setFiles([]);
    notify(null);
    send(text, files);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    } else if (event.key === "ArrowUp" && !text && last) {
      const question = last.role === "user" ? last : getState().messages[last.parent];
      if (question && !running) {
        event.preventDefault();
        set({ editing: question.id });
      }
    }
  };
  const onPaste = (event) => {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      attach(event.clipboardData.files);
    }
  };
  const onDrop = (event) => {
    event.preventDefault();
    setOver(false);
    attach(event.dataTransfer.files);
  };
  const over = (isIn) => (event) => {
    event.preventDefault();
    setOver(isIn);
  };
  return html`<form class=${isOver ? "composer over" : "composer"} onSubmit=${(event) => (event.preventDefault(), submit())}
    onDragOver=${over(true)} onDragLeave=${over(false)} onDrop=${onDrop}>
    ${files.length > 0 &&
    html`<ul class="files">
      ${files.map(
        (file, index) => html`<li>
          ${file.name}
          <button type="button" aria-label=${`Remove ${file.name}`} onClick=${() => setFiles(files.toSpliced(index, 1))}>✕</button>
        </li>`,
      )}
    </ul>`}
    <textarea id="composer" ref=${area} rows="1" aria-label="Message" placeholder="Message" value=${text}
      onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown} onPaste=${onPaste}></textarea>
    <div class="row">
      <button type="button" onClick=${() => input.current.click()}>Attach</button>
      <input ref=${input} type="file" multiple class="hidden" tabindex="-1" aria-hidden="true" data-file="attach"
        onChange=${(event) => (attach([...event.target.files]), (event.target.value = ""))} />
      <span class="space"></span>
      ${running
        ? html`<button key="stop" type="button" class="primary" onClick=${() => stop(running)}>Stop</button>`
        : html`<button key="send" type="submit" class="primary" disabled=${!(text.trim() || files.length)}>Send</button>`}
    </div>
  </form>`;
}
