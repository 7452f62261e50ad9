// Export and import of conversations as JSON, and text files as attachments.

import { loadHeads, loadMessages, save } from "./database.js";
import { dispatch, getState } from "./store.js";
import { newId } from "./tree.js";

const FORMAT = "genai-conversations";
const MOST_ATTACHMENT_BYTES = 2 ** 20;

/** Return all conversations, or one, with all messages of all branches. */
export async function exported(id = null) {
  const heads = (await loadHeads()).filter((one) => id === null || one.id === id);
  const conversations = [];
  for (const head of heads) conversations.push({ ...head, messages: Object.values(await loadMessages(head.id)) });
  return { format: FORMAT, version: 1, exported: new Date().toISOString(), conversations };
}

/** Download an export as a file. */
export async function download(id = null) {
  const data = new Blob([JSON.stringify(await exported(id), null, 1)], { type: "application/json" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(data);
  link.download = `genai-${new Date().toISOString().slice(0, 10)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const isText = (value) => typeof value === "string";
const isIdOrNull = (value) => value === null || isText(value);

function checkedMessage(message, conversation) {
  const { id, parent, role, content, created } = message ?? {};
  const isRight = isText(id) && isIdOrNull(parent) && ["user", "assistant"].includes(role) && isText(content);
  if (!isRight || !Number.isFinite(created)) throw new Error("a message is incomplete");
  const attachments = message.attachments ?? [];
  if (!Array.isArray(attachments) || !attachments.every((one) => isText(one?.name) && isText(one?.text))) {
    throw new Error("an attachment is incomplete");
  }
  // A reply that was in progress at the export does not continue here.
  const status = message.status === "streaming" ? { status: "stopped" } : {};
  return { ...message, ...status, conversation };
}

function checkedConversation(value) {
  const { messages, ...head } = value ?? {};
  if (!isText(head.id) || !isText(head.title) || !Array.isArray(messages)) throw new Error("a conversation is incomplete");
  if (!isIdOrNull(head.leaf) || !Number.isFinite(head.created) || !Number.isFinite(head.updated)) {
    throw new Error(`the conversation "${head.title}" is incomplete`);
  }
  const { model = "", system = "", reasoning = "", options = {} } = head;
  if (![model, system, reasoning].every(isText) || options === null || typeof options !== "object") {
    throw new Error(`the settings of the conversation "${head.title}" are wrong`);
  }
  const checked = messages.map((one) => checkedMessage(one, head.id));
  const known = new Map(checked.map((one) => [one.id, one]));
  if (known.size !== messages.length || (head.leaf !== null && !known.has(head.leaf))) {
    throw new Error(`the messages of the conversation "${head.title}" do not belong together`);
  }
  for (const { parent, created } of checked) {
    // Parents are older, so that no branch is a circle.
    if (parent !== null && !(known.get(parent)?.created < created)) {
      throw new Error(`the messages of the conversation "${head.title}" do not belong together`);
    }
  }
  return [{ ...head, model, system, reasoning, options }, checked];
}

/**
 * Add the conversations of an export. A conversation that is stored here already is skipped if it is equal, and
 * otherwise added beside the stored one. Return the number of added conversations. Raises Error if the file is wrong;
 * then nothing is added.
 */
export async function importText(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON. Select a file that this page exported.");
  }
  if (data?.format !== FORMAT || data.version !== 1 || !Array.isArray(data.conversations)) {
    throw new Error("The file is not an export of this page. Select a file that this page exported.");
  }
  let checked;
  try {
    checked = data.conversations.map(checkedConversation);
  } catch (error) {
    throw new Error(`The file cannot be used: ${error.message}. Nothing was added.`);
  }
  let count = 0;
  for (const [head, messages] of checked) {
    const stored = getState().heads.find((one) => one.id === head.id);
    if (stored && stored.updated === head.updated) continue;
    const id = stored ? newId() : head.id;
    const moved = { ...head, id };
    await save(moved, messages.map((one) => ({ ...one, conversation: id })));
    dispatch({ type: "head", head: moved });
    count += 1;
  }
  return count;
}

/** Return a file as an attachment. Raises Error if it is not a text. */
export async function attachment(file) {
  if (file.size > MOST_ATTACHMENT_BYTES) {
    throw new Error(`${file.name} has ${(file.size / 2 ** 20).toFixed(1)} MiB. Attach a text of at most 1 MiB.`);
  }
  const data = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(data);
    if (text.includes("\0")) throw new Error();
    return { name: file.name, text };
  } catch {
    throw new Error(`${file.name} is not a text in UTF-8. Attach a text file.`);
  }
}
