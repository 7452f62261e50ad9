// What a user does with conversations: open, send, edit, retry, switch branches, rename, delete.

import { loadHeads, loadMessages, remove, save } from "./database.js";
import { generate, isRunning, resume, stop } from "./replies.js";
import { currentHead, dispatch, getState, notifyUnsaved, set } from "./store.js";
import { allSiblings, branch, newestLeaf, newId } from "./tree.js";

const DEFAULTS = "genai-defaults";
const TITLE_LENGTH = 60;

/** Return the settings of new conversations. */
export function newDraft() {
  let stored = {};
  try {
    stored = JSON.parse(localStorage.getItem(DEFAULTS) ?? "{}");
  } catch {
    // Broken settings are replaced with the next change.
  }
  const { model = "", system = "", reasoning = "", options = {} } = stored;
  return { model, system, reasoning, options };
}

let wanted = null; // the conversation that the user opened last

/** Show a new conversation. */
export function openNew() {
  wanted = null;
  dispatch({ type: "opened", id: null, messages: {} });
  set({ draft: newDraft() });
  location.hash = "";
  document.getElementById("composer")?.focus();
}

/** Show a conversation, and continue to receive its replies. */
export async function open(id) {
  if (!getState().heads.some((one) => one.id === id)) return openNew();
  wanted = id;
  const messages = await loadMessages(id);
  if (wanted !== id) return null; // the user has opened another one in the meantime
  dispatch({ type: "opened", id, messages });
  location.hash = id;
  for (const message of Object.values(messages)) if (message.status === "streaming") resume(message);
  return null;
}

/** Read a conversation again that another tab has changed. */
export async function refresh(id) {
  dispatch({ type: "heads", heads: await loadHeads() });
  if (getState().current !== id) return;
  if (!getState().heads.some((one) => one.id === id)) return openNew();
  const stored = await loadMessages(id);
  for (const message of Object.values(stored)) {
    if (isRunning(message.id)) continue;
    dispatch({ type: "message", message });
    if (message.status === "streaming") resume(message);
  }
}

/** Store changes. If this fails, say so, and keep the changes in memory. */
async function store(head, messages = []) {
  if (head) dispatch({ type: "head", head });
  for (const message of messages) dispatch({ type: "message", message });
  try {
    await save(head, messages);
  } catch (error) {
    notifyUnsaved(error);
  }
}

function newMessage(conversation, parent, role, fields) {
  // The clock may stand still between two messages, and siblings are sorted by time.
  const created = Math.max(Date.now(), (getState().messages[parent]?.created ?? 0) + 1);
  return { id: newId(), conversation, parent, role, content: "", created, ...fields };
}

function titleOf(text, attachments) {
  const line = text.trim().split("\n")[0] || attachments[0]?.name || "New conversation";
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}

/** Send a message after the last one of the shown branch. */
export async function send(content, attachments) {
  const state = getState();
  let head = currentHead(state);
  if (!state.current) {
    head = { ...state.draft, id: newId(), title: titleOf(content, attachments), created: Date.now(), leaf: null };
    wanted = head.id;
    dispatch({ type: "head", head: { ...head, updated: Date.now() } });
    dispatch({ type: "opened", id: head.id, messages: {} });
    location.hash = head.id;
  }
  await ask(head, newMessage(head.id, head.leaf, "user", { content, attachments }));
}

/** Replace a message of the user: the changed message begins a new branch. */
export async function edit(message, content) {
  set({ editing: null });
  const { attachments = [] } = message;
  await ask(currentHead(), newMessage(message.conversation, message.parent, "user", { content, attachments }));
}

async function ask(head, question) {
  const messages = { ...getState().messages, [question.id]: question };
  await reply(head, messages, question);
}

/** Generate a further reply to the same message, as a new branch. */
export async function retry(message) {
  const { messages } = getState();
  await reply(currentHead(), messages, messages[message.parent]);
}

async function reply(head, messages, question) {
  const model = head.model || getState().models[0]?.id || "";
  const answer = newMessage(head.id, question.id, "assistant", { status: "streaming", model, reasoning: "" });
  answer.created = Math.max(answer.created, question.created + 1);
  const changed = { ...head, leaf: answer.id, updated: Date.now() };
  await store(changed, [question, answer]);
  await generate(changed, branch(messages, question.id), answer);
}

/** Show the previous (-1) or the next (+1) variant of a message. */
export function switchBranch(message, step) {
  const { messages } = getState();
  const group = allSiblings(messages)[message.id];
  const other = group[group.indexOf(message) + step];
  if (other) store({ ...currentHead(), leaf: newestLeaf(messages, other.id) });
}

/** Change the title, the model, the system message or the sampling options. */
export function change(values, { isDefault = false } = {}) {
  const { current, draft } = getState();
  const changed = { ...currentHead(), ...values };
  if (current) store(changed);
  else set({ draft: { ...draft, ...values } });
  if (isDefault) {
    const { model, system, reasoning, options } = changed;
    localStorage.setItem(DEFAULTS, JSON.stringify({ model, system, reasoning, options }));
  }
}

/** Delete a conversation. */
export async function deleteConversation(id) {
  if (getState().current === id) {
    for (const message of Object.values(getState().messages)) if (isRunning(message.id)) stop(message.id);
  }
  dispatch({ type: "removed", id });
  if (!getState().current) location.hash = "";
  await remove(id);
}
