// Markdown as elements of the page, built while the text arrives. HTML in a reply is shown as text. Links with other
// schemes than those of the web and of mail are removed, and images are links, so that a reply cannot make the browser
// send data to another server.

import DOMPurify from "./vendor/dompurify.js";
import hljs from "./vendor/highlight.js";
import * as smd from "./vendor/streaming-markdown.js";

const MOST_HIGHLIGHTED = 50_000; // characters; longer code would block the page

/** A renderer for one text. */
export class MarkdownWriter {
  constructor(element) {
    element.replaceChildren();
    this.length = 0;
    this.parser = smd.parser(safeRenderer(element));
  }

  /** Write the part of a text that is not written yet. */
  writeUpTo(text) {
    smd.parser_write(this.parser, text.slice(this.length));
    this.length = text.length;
  }

  end() {
    smd.parser_end(this.parser);
  }
}

function safeRenderer(element) {
  const plain = smd.default_renderer(element);
  const kinds = [];
  return {
    data: plain.data,
    add_token(data, type) {
      kinds.push(type);
      plain.add_token(data, type === smd.IMAGE ? smd.LINK : type);
    },
    end_token(data) {
      const node = data.nodes[data.index];
      const type = kinds.pop();
      plain.end_token(data);
      if (type === smd.CODE_FENCE || type === smd.CODE_BLOCK) finishCode(node);
      if (type === smd.TABLE) wrap(node, "table");
      if (type === smd.CHECKBOX) node.setAttribute("aria-label", node.checked ? "done" : "not done");
    },
    add_text: plain.add_text,
    set_attr(data, type, value) {
      const node = data.nodes[data.index];
      if (type !== smd.HREF && type !== smd.SRC) {
        plain.set_attr(data, type, value);
      } else if (isSafe(value)) {
        node.setAttribute("href", value);
        node.setAttribute("target", "_blank");
        node.setAttribute("rel", "noopener noreferrer nofollow");
        if (type === smd.SRC && !node.textContent) node.textContent = value;
      }
    },
  };
}

// A relative address is refused, too: it would be one of this server.
function isSafe(address) {
  try {
    return ["http:", "https:", "mailto:"].includes(new URL(address).protocol);
  } catch {
    return false;
  }
}

function wrap(node, name) {
  const outer = document.createElement("div");
  outer.className = name;
  outer.tabIndex = 0; // a keyboard can then scroll it
  node.replaceWith(outer);
  outer.append(node);
  return outer;
}

function finishCode(code) {
  const pre = code.parentElement;
  const language = code.className.trim().split(/[\s:{]/)[0];
  const text = code.textContent;
  if (hljs.getLanguage(language) && text.length <= MOST_HIGHLIGHTED) {
    const { value } = hljs.highlight(text, { language, ignoreIllegals: true });
    code.innerHTML = DOMPurify.sanitize(value, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_TRUSTED_TYPE: true });
  }
  pre.tabIndex = 0;
  const outer = wrap(pre, "code");
  outer.removeAttribute("tabindex");
  const bar = document.createElement("div");
  bar.className = "bar";
  const name = document.createElement("span");
  name.textContent = language;
  const copy = document.createElement("button");
  copy.type = "button";
  copy.textContent = "Copy code";
  copy.addEventListener("click", () => copyText(text, copy));
  bar.append(name, copy);
  outer.prepend(bar);
}

/** Copy a text, and say so on the button. */
export async function copyText(text, button) {
  const before = button.textContent;
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyBySelection(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not copied";
  }
  setTimeout(() => (button.textContent = before), 1500);
}

// navigator.clipboard does not exist on pages without TLS.
function copyBySelection(text) {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (!isCopied) throw new Error("not copied");
}
