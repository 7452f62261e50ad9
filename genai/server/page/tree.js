// The branches of a conversation. Messages form a tree: each has the id of its parent, or null. The conversation's
// `leaf` is the last message of the branch that is shown. All functions are pure.

/** Return the messages from the first one to the leaf. */
export function branch(messages, leaf) {
  const found = [];
  for (let message = messages[leaf]; message; message = messages[message.parent]) found.push(message);
  return found.reverse();
}

/** Return the messages with the same parent and role as a message, in the order of their creation. */
export function siblings(messages, message) {
  return Object.values(messages)
    .filter((one) => one.parent === message.parent && one.role === message.role)
    .sort(byAge);
}

/** Return the siblings of every message by its id. One pass over all messages, because a conversation can be long. */
export function allSiblings(messages) {
  const groups = new Map();
  for (const message of Object.values(messages)) {
    const key = `${message.parent} ${message.role}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(message);
  }
  const found = {};
  for (const group of groups.values()) {
    group.sort(byAge);
    for (const message of group) found[message.id] = group;
  }
  return found;
}

/** Return the id of the last message that follows a message on its newest branch. */
export function newestLeaf(messages, id) {
  const children = new Map();
  for (const message of Object.values(messages)) {
    const newest = children.get(message.parent);
    if (!newest || byAge(newest, message) < 0) children.set(message.parent, message);
  }
  let leaf = id;
  while (children.has(leaf)) leaf = children.get(leaf).id;
  return leaf;
}

function byAge(a, b) {
  return a.created - b.created || (a.id < b.id ? -1 : 1);
}

/** Return a random identifier. crypto.randomUUID does not exist on pages without TLS. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (one) => one.toString(16).padStart(2, "0")).join("");
}
