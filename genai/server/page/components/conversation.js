// The messages of the shown branch. Only the last ones are elements of the page; earlier ones are shown on demand.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../html.js";
import { allSiblings } from "../tree.js";
import { Message } from "./message.js";

const PAGE = 40;
const NEAR = 80; // pixels from the end within which the view follows the text

export function Conversation({ messages, all, streaming, editing }) {
  const [count, setCount] = useState(PAGE);
  const view = useRef(null);
  const list = useRef(null);
  const follows = useRef(true);
  const [isAway, setAway] = useState(false);
  const groups = useMemo(() => allSiblings(all), [all]);
  const last = messages.at(-1)?.id;

  const toEnd = () => {
    if (view.current) view.current.scrollTop = view.current.scrollHeight;
  };
  const onScroll = () => {
    const { scrollHeight, scrollTop, clientHeight } = view.current;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR;
    setAway(!follows.current);
  };
  useLayoutEffect(() => {
    follows.current = true;
    toEnd();
  }, [last]);
  useEffect(() => {
    const observer = new ResizeObserver(() => follows.current && toEnd());
    observer.observe(list.current);
    observer.observe(view.current);
    return () => observer.disconnect();
  }, []);

  const earlier = Math.max(0, messages.length - count);
  const showEarlier = () => {
    const { scrollHeight, scrollTop } = view.current;
    follows.current = false;
    setCount(count + PAGE);
    // The text that the reader sees remains in its place.
    requestAnimationFrame(() => (view.current.scrollTop = scrollTop + view.current.scrollHeight - scrollHeight));
  };
  return html`
    <div class="view" ref=${view} onScroll=${onScroll} tabindex="0" role="region" aria-label="Messages">
      <div class="list" ref=${list}>
        ${earlier > 0 &&
        html`<button type="button" class="earlier" onClick=${showEarlier}>Show earlier messages (${earlier})</button>`}
        ${messages.length === 0 && html`<p class="empty">Write a message to begin. Conversations are stored in this browser.</p>`}
        ${messages.slice(earlier).map(
          (message) => html`<${Message} key=${message.id} message=${message} siblings=${groups[message.id]}
            isStreaming=${Boolean(streaming[message.id])} isEditing=${editing === message.id} />`,
        )}
      </div>
      ${isAway && html`<button type="button" class="to-end" onClick=${toEnd}>Jump to the end</button>`}
    </div>
  `;
}
