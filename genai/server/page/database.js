// Conversations in IndexedDB. Each message is a record of its own, so that a message that cannot be stored (because the
// browser's space is used up) does not affect the others. Without IndexedDB, conversations are in memory only.

const NAME = "genai";
const VERSION = 1;
let database = null;
const memory = { conversations: new Map(), messages: new Map() };
const channel = "BroadcastChannel" in window ? new BroadcastChannel("genai") : null;

/** Open the database. Return false if conversations cannot be stored. */
export async function openDatabase() {
  try {
    database = await new Promise((resolve, reject) => {
      const opening = indexedDB.open(NAME, VERSION);
      // A later version adds stores here, and deletes none.
      opening.onupgradeneeded = () => {
        opening.result.createObjectStore("conversations", { keyPath: "id" });
        opening.result.createObjectStore("messages", { keyPath: ["conversation", "id"] });
      };
      opening.onsuccess = () => resolve(opening.result);
      opening.onerror = opening.onblocked = () => reject(opening.error ?? new Error("blocked"));
    });
    // A tab with a newer page can then upgrade the database.
    database.onversionchange = () => database.close();
    return true;
  } catch {
    return false;
  }
}

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const finished = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onerror = transaction.onabort = () => reject(transaction.error ?? new Error("aborted"));
  });

const range = (id) => IDBKeyRange.bound([id], [id, []]);

/** Return all conversations without their messages. */
export async function loadHeads() {
  if (!database) return [...memory.conversations.values()];
  return settled(database.transaction("conversations").objectStore("conversations").getAll());
}

/** Return the messages of a conversation by their ids. */
export async function loadMessages(id) {
  const found = database
    ? await settled(database.transaction("messages").objectStore("messages").getAll(range(id)))
    : [...memory.messages.values()].filter((one) => one.conversation === id);
  return Object.fromEntries(found.map((one) => [one.id, one]));
}

/** Store a conversation and some of its messages, all or nothing. Raises DOMException if there is no space. */
export async function save(head, messages = [], { isQuiet = false } = {}) {
  if (database) {
    const transaction = database.transaction(["conversations", "messages"], "readwrite");
    if (head) transaction.objectStore("conversations").put(head);
    for (const message of messages) transaction.objectStore("messages").put(message);
    await finished(transaction);
  } else {
    if (head) memory.conversations.set(head.id, head);
    for (const message of messages) memory.messages.set(`${message.conversation} ${message.id}`, message);
  }
  if (!isQuiet) channel?.postMessage({ id: head?.id ?? messages[0]?.conversation });
}

/** Delete a conversation with its messages. */
export async function remove(id) {
  if (database) {
    const transaction = database.transaction(["conversations", "messages"], "readwrite");
    transaction.objectStore("conversations").delete(id);
    transaction.objectStore("messages").delete(range(id));
    await finished(transaction);
  } else {
    memory.conversations.delete(id);
    for (const [key, message] of memory.messages) if (message.conversation === id) memory.messages.delete(key);
  }
  channel?.postMessage({ id });
}

/** Call a function with the id of each conversation that another tab changes. */
export function onChange(call) {
  if (channel) channel.onmessage = ({ data }) => call(data.id);
}
