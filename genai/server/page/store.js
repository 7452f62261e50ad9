// The state of the page, and its reducer. Texts that are being streamed are not in the state (see live.js), so that a
// token does not render the whole page.

export const initial = {
  isReady: false,
  heads: [], // conversations without their messages, the last used one first
  current: null, // id of the open conversation; null = a new one
  draft: null, // settings of a new conversation
  messages: {}, // messages of the open conversation by id
  streaming: {}, // ids of messages that are being received
  models: [],
  server: "unknown", // "up", "down", or "locked" if the server needs a key
  editing: null, // id of the message that is being edited
  panel: null, // the open dialog: "settings", "key", "help" or null
  isSidebarOpen: false, // on narrow screens
  notice: null,
};

const byUse = (a, b) => b.updated - a.updated;

const reducers = {
  ready: (state, { heads, draft, notice }) => ({ ...state, isReady: true, heads: [...heads].sort(byUse), draft, notice }),
  heads: (state, { heads }) => ({ ...state, heads: [...heads].sort(byUse) }),
  head: (state, { head }) => ({
    ...state,
    heads: [head, ...state.heads.filter((one) => one.id !== head.id)].sort(byUse),
  }),
  removed: (state, { id }) => {
    const heads = state.heads.filter((one) => one.id !== id);
    return state.current === id ? { ...state, heads, current: null, messages: {}, editing: null } : { ...state, heads };
  },
  opened: (state, { id, messages }) => ({ ...state, current: id, messages, editing: null, isSidebarOpen: false }),
  message: (state, { message }) =>
    message.conversation === state.current
      ? { ...state, messages: { ...state.messages, [message.id]: message } }
      : state,
  streaming: (state, { id, isOn }) => {
    const streaming = { ...state.streaming };
    if (isOn) streaming[id] = true;
    else delete streaming[id];
    return { ...state, streaming };
  },
  server: (state, { server, models }) => ({ ...state, server, models: models ?? state.models }),
  set: (state, { values }) => ({ ...state, ...values }),
};

/** Return the state after an action. */
export function reduce(state, action) {
  return reducers[action.type](state, action);
}

let state = initial;
const listeners = new Set();

export const getState = () => state;

export function dispatch(action) {
  state = reduce(state, action);
  for (const listener of listeners) listener(state);
}

/** Call a function after each action. Return the function that ends this. */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Return the open conversation without its messages, or the settings of a new one. */
export function currentHead(of = state) {
  return of.heads.find((one) => one.id === of.current) ?? of.draft;
}

export const set = (values) => dispatch({ type: "set", values });

/** Show a text above the composer; null removes it. */
export const notify = (notice) => set({ notice });

/** Report that a change is in memory only. */
export function notifyUnsaved(error) {
  const reason = error.name === "QuotaExceededError" ? "the browser's space is used up" : error.message;
  notify(`The last change is not stored: ${reason}. Export the conversation, or delete old ones.`);
}

/** Say a text through the screen reader. */
export function say(text) {
  document.getElementById("said").textContent = text;
}
